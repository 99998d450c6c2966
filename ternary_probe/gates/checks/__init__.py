"""The checks, one file each; a new file here is a new check.

No module here may import torch when it is imported: ``gate --list`` and ``gate --parameters-only`` do without it.
"""

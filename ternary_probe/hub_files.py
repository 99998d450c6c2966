"""Fetch the files of a model on the Hugging Face Hub, pinned to one commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ternary_probe.checkpoint import CONFIG, INDEX, SINGLE, read_index
from ternary_probe.errors import ProbeError


class HubError(ProbeError):
    """The Hub does not give the model."""


def fetch_checkpoint(repository: str, revision: str | None) -> Path:
    """Bring config and safetensors of a model into the Hub cache.

    Args:
        repository: The hub id, ``owner/name`` or ``name``.
        revision: Branch, tag or commit; None for the default branch.

    Returns:
        The snapshot folder; its name is the commit. Without safetensors in the repository it holds the config only.

    Raises:
        HubError: If the repository, revision or config does not exist, access is denied, or the Hub cannot be reached.
    """
    with named_errors(repository, revision):
        folder = Path(hf_hub_download(repository, CONFIG, revision=revision)).parent
        if download(repository, SINGLE, folder.name) is None and (index := download(repository, INDEX, folder.name)):
            shards = sorted(set(read_index(index).values()))
            snapshot_download(repository, revision=folder.name, allow_patterns=shards)
    return folder


@contextmanager
def named_errors(repository: str, revision: str | None) -> Iterator[None]:
    """Turn whatever the Hub's library raises into one sentence that names the model and the mend.

    Args:
        repository: The hub id.
        revision: Branch, tag or commit; None for the default branch.

    Raises:
        HubError: If the block raised an error of the Hub, of the network or of the file system.
    """
    try:
        yield
    except GatedRepoError as error:
        raise HubError(f"{repository} is gated: accept its terms on the Hub and log in with `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise HubError(f"{repository} has no revision {revision!r}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise HubError(
            f"{repository!r} is neither a folder here nor a model on the Hub: check the name, or log in"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        why = (
            "HF_HUB_OFFLINE is set: unset it, or check the name"
            if constants.HF_HUB_OFFLINE
            else "the Hub cannot be reached: check name and network"
        )
        at = f" at revision {revision!r}" if revision else ""
        raise HubError(f"{repository!r} is neither a folder here nor in the local Hub cache{at}, and {why}") from error
    except EntryNotFoundError as error:
        raise HubError(f"{repository} on the Hub is not a transformers checkpoint: it has no {CONFIG}") from error
    except OSError as error:
        raise HubError(f"{repository} cannot be fetched from the Hub: {' '.join(str(error).split())[:200]}") from error


def download(repository: str, name: str, commit: str) -> Path | None:
    """Fetch one file that need not exist; what the cache knows about a commit is final, so the Hub is not asked again.

    Args:
        repository: The hub id.
        name: The file.
        commit: The commit.

    Returns:
        Its path in the cache, or None if the repository (offline: the cache) does not hold it.

    Raises:
        EntryNotFoundError: If the Hub went away, so that it is not known whether it holds the file.
    """
    cached = try_to_load_from_cache(repository, name, revision=commit)
    if cached is not None:
        return Path(cached) if isinstance(cached, str) else None
    try:
        return Path(hf_hub_download(repository, name, revision=commit))
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError) and not constants.HF_HUB_OFFLINE:
            raise  # the Hub went away; whether it has the file is not known
        return None

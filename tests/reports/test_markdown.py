"""report.md: valid tables with the terminal's figures, links that resolve, nothing active in a name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from reports.factory import inspect_record, leverage_record, model, perplexity_record, protocol, published

from ternary_probe.errors import ProbeError
from ternary_probe.records import Record
from ternary_probe.reports.leverage_sheet import leverage_sheet
from ternary_probe.reports.markdown import escape, to_markdown


def parsed(text: str) -> list:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def plain(inline) -> str:
    return "".join(child.content for child in inline.children if child.type in {"text", "code_inline", "text_special"})


def tables(text: str) -> list[list[list[str]]]:
    found: list[list[list[str]]] = []
    tokens = parsed(text)
    for index, token in enumerate(tokens):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in {"td_open", "th_open"}:
            found[-1][-1].append(plain(tokens[index + 1]))
    return found


RECORDS = {
    "leverage": lambda: leverage_record(published=published()),
    "perplexity": perplexity_record,
    "inspect": inspect_record,
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_every_table_is_valid(record):
    text = to_markdown(record())

    found = tables(text)
    assert len(found) >= 3
    assert len(found) == len(re.findall(r"^\|[ :|-]+\|$", text, re.MULTILINE)), "each is parsed as a table"
    for rows in found:
        assert len({len(cells) for cells in rows}) == 1
        assert len(rows) > 1


def test_tables_hold_the_same_cells_as_the_terminal():
    record = leverage_record(published=published())

    found = tables(to_markdown(record))

    for table, rows in zip(leverage_sheet(record).tables, sorted_like(record, found), strict=True):
        assert rows[0] == [" ".join(column.header.split()) for column in table.columns]
        assert rows[1:] == [[cell.replace("\n", ", ") for cell in cells] for cells in table.rows]


def sorted_like(record: Record, found: list) -> list:
    sheet = leverage_sheet(record)
    order = [t for t in sheet.tables if not t.detail] + [t for t in sheet.tables if t.detail]
    return [found[order.index(table)] for table in sheet.tables]


HOSTILE = ["a|b_c_d", "snake_case_*bold*", "`tick|tick`", "<b>html</b>", "~~gone~~", "x](http://evil)", "&lt;", "$a$"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_shows_as_it_is(name):
    record = leverage_record(model=model(name=name), protocol=protocol(text=name), notes=(name,))

    text = to_markdown(record)

    heading = next(t for i, t in enumerate(parsed(text)) if t.type == "inline")
    assert plain(heading).endswith(name)
    cells = [cell for rows in tables(text) for cells in rows for cell in cells]
    assert cells.count(name) == 2, "model name and text label, unbroken, in their tables"
    kinds = {child.type for token in parsed(text) if token.type == "inline" for child in token.children}
    assert not kinds & {"html_inline", "link_open", "s_open"}


@pytest.mark.parametrize("text", ["- dash", "# heading", "1. item", "+ plus", "-0.5", "1.5 nats"])
def test_an_escaped_line_stays_a_paragraph(text):
    tokens = parsed(escape(text))

    assert [t.type for t in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    assert plain(tokens[1]) == text


def test_line_breaks_cannot_break_a_table():
    assert "\n" not in escape("one\ntwo\r\nthree")


def test_figures_are_linked_relative_to_the_report(tmp_path):
    folder = tmp_path / "out dir"
    figures = {"response_curve": folder / "figures" / "response_curve.png"}

    text = to_markdown(leverage_record(), figures, folder=folder)

    assert "](figures/response_curve.png)" in text
    assert str(tmp_path) not in text
    assert "](response_curve.png)" in to_markdown(leverage_record(), figures)
    assert "](a%20b/c.png)" in to_markdown(leverage_record(), {"x": Path("a b/c.png")})


def test_each_figure_is_explained():
    figures = {name: Path(f"{name}.png") for name in ("response_curve", "amplitude_profile", "predicted_leverage")}

    text = to_markdown(leverage_record(), figures)

    for name in figures:
        caption = text.split(f"({name}.png)")[1].split("\n\n")[1]
        assert len(re.findall(r"[a-z)]\.(?:\s|$)", caption)) >= 2


def test_how_to_reproduce_gives_the_exact_command():
    command = "ternary-probe leverage 'my model' --seeds 8 --note '```'"

    fences = [t for t in parsed(to_markdown(leverage_record(), command_line=command)) if t.type == "fence"]

    assert [(t.info, t.content) for t in fences] == [("sh", f"{command}\n")]


def test_protocol_environment_and_hashes_are_in_full():
    text = to_markdown(leverage_record())

    for piece in ("cd" * 32, "ab" * 32, "2.13.0", "Protocol of the scored text", "Protocol of the calibration text"):
        assert piece in text


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_no_nan_or_none_is_written(record):
    assert not re.search(r"\b(NaN|nan|[iI]nf|infinity|None)\b", to_markdown(record()))


def test_a_record_without_a_report_is_refused():
    base = perplexity_record()
    record = Record(**{name: getattr(base, name) for name in Record.model_fields} | {"command": "doctor"})

    with pytest.raises(ProbeError, match="doctor"):
        to_markdown(record)

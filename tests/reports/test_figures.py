"""Figures hold the record's data, are readable without colour, and come out the same each time."""

from __future__ import annotations

import struct
import subprocess
import sys
import warnings

import numpy as np
import pytest
from reports.factory import BLOCKS, MEANS, RATES, ROLES, curves, leverage_record, leverages, mean, means, published

from ternary_probe.errors import ProbeError
from ternary_probe.reports.figures import amplitude_profile, draw, predicted_leverage, response_curve


def lines(axes) -> dict[str, object]:
    """Labelled series: error bars by their container's label, plain lines by their own."""
    found = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    found.update({c.get_label(): c.lines[0] for c in axes.containers})
    return found


def bars(axes, label: str) -> np.ndarray:
    container = next(c for c in axes.containers if c.get_label() == label)
    return np.array([segment[:, 1] for segment in container.lines[2][0].get_segments()])


@pytest.mark.parametrize(("panel", "field"), [(0, 0), (1, 2)], ids=["nll", "kl"])
@pytest.mark.parametrize("arm", ["outlier", "other", "all"])
def test_the_response_curve_holds_every_mean_and_interval(panel, field, arm):
    axes = response_curve(leverage_record()).axes[panel]

    line = lines(axes)[arm]
    assert tuple(line.get_xdata()) == RATES
    assert tuple(line.get_ydata()) == tuple(MEANS[rate, arm][field] for rate in RATES)
    expected = [
        (MEANS[r, arm][field] - MEANS[r, arm][field + 1], MEANS[r, arm][field] + MEANS[r, arm][field + 1])
        for r in RATES
    ]
    np.testing.assert_allclose(bars(axes, arm), expected)


def test_the_response_curve_is_log_log_with_a_line_of_slope_one_and_the_noise_floor():
    record = leverage_record()
    for axes, floor in zip(response_curve(record).axes, (record.noise_floor.nll, record.noise_floor.kl), strict=True):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        x, y = lines(axes)["slope 1"].get_data()
        assert np.log(y[1] / y[0]) / np.log(x[1] / x[0]) == pytest.approx(1)
        band = next(p for p in axes.patches if p.get_label() == "below noise floor")
        assert band.get_y() + band.get_height() == pytest.approx(floor)


def test_means_that_are_not_positive_are_left_out_and_named():
    entries = (mean(0.001, "other", "nll", -0.0004, 0.002), *means()[:2], *means()[4:])

    figure = response_curve(leverage_record(means=entries))

    assert tuple(lines(figure.axes[0])["other"].get_xdata()) == (0.005,)
    assert "ΔNLL other 0.1 %" in " ".join(figure.get_supxlabel().split())
    assert "no positive mean" not in response_curve(leverage_record()).get_supxlabel()


def test_an_interval_that_reaches_zero_does_not_stretch_the_axis():
    low, high = response_curve(leverage_record()).axes[0].get_ylim()

    assert high / low < 1e5


def test_published_points_are_hollow_named_and_only_with_nll():
    nll, kl = response_curve(leverage_record(published=published())).axes

    point = lines(nll)["paper’s outlier"]
    assert tuple(point.get_xdata()) == (0.005, 0.05)
    assert tuple(point.get_ydata()) == (0.03043, 1.3451)
    assert point.get_markerfacecolor() == "none"
    assert not [label for label in lines(kl) if "paper" in label]


def test_no_two_series_share_colour_or_marker():
    for figure in (
        response_curve(leverage_record()),
        predicted_leverage(leverage_record()),
        amplitude_profile(leverage_record()),
    ):
        for axes in figure.axes:
            series = [line for label, line in lines(axes).items() if line.get_marker() not in {"None", "none", None}]
            assert len({line.get_marker() for line in series}) == len(series)
            assert len({line.get_color() for line in series}) == len(series)


def test_the_amplitude_profile_is_the_median_over_blocks_with_its_band():
    record = leverage_record()

    axes = amplitude_profile(record).axes[0]

    assert list(lines(axes)) == list(ROLES)
    profiles = np.array([a.alpha_sorted for a in record.amplitude if a.role == "q_proj"])
    np.testing.assert_allclose(lines(axes)["q_proj"].get_ydata(), np.median(profiles, axis=0))
    assert tuple(lines(axes)["q_proj"].get_xdata()) == record.amplitude[0].alpha_rank
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(profiles.min())
    assert band.max() == pytest.approx(profiles.max())


def test_roles_that_read_one_input_share_a_line_instead_of_hiding_each_other():
    record = leverage_record()
    queries = {a.block: a for a in record.amplitude if a.role == "q_proj"}
    shared = tuple(
        queries[a.block].model_copy(update={"matrix": a.matrix, "role": a.role})
        if a.role in {"k_proj", "v_proj"}
        else a
        for a in record.amplitude
    )
    for figure in (amplitude_profile, predicted_leverage):
        labels = list(lines(figure(leverage_record(amplitude=shared)).axes[0]))
        assert labels[0] == "q_proj, k_proj, v_proj"
        assert "k_proj" not in labels


def test_dead_inputs_end_a_profile_without_a_warning():
    dead = tuple(
        a.model_copy(update={"alpha_sorted": (*a.alpha_sorted[:10], *[0.0] * (len(a.alpha_sorted) - 10))})
        for a in leverage_record().amplitude
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        axes = amplitude_profile(leverage_record(amplitude=dead)).axes[0]

    assert len(lines(axes)["q_proj"].get_ydata()) == 10


def test_predicted_leverage_has_a_marker_per_block_and_role_and_the_mean_line():
    record = leverage_record()

    axes = predicted_leverage(record).axes[0]

    for role in ROLES:
        line = lines(axes)[role]
        assert list(line.get_xdata()) == list(range(BLOCKS))
        assert list(line.get_ydata()) == [a.n_alpha2_outlier for a in record.amplitude if a.role == role]
    assert set(lines(axes)["mean prediction"].get_ydata()) == {record.prediction.n_alpha2_outlier}


def test_measured_leverage_over_all_stands_beside_the_prediction():
    beside = predicted_leverage(leverage_record()).axes[1]

    assert list(lines(beside)["measured, ΔNLL"].get_ydata()) == [10.3, 10.77]
    np.testing.assert_allclose(bars(beside, "measured, KL"), [(7.91, 13.42), (8.03, 12.11)])


def test_an_inconclusive_leverage_is_not_drawn():
    entries = tuple(e.model_copy(update={"status": "inconclusive"}) if e.rate == 0.001 else e for e in leverages())

    beside = predicted_leverage(leverage_record(leverage=entries)).axes[1]

    assert list(lines(beside)["measured, ΔNLL"].get_ydata()) == [10.77]


def test_without_a_measured_leverage_only_the_prediction_is_drawn():
    assert len(predicted_leverage(leverage_record(leverage=(), curves=curves())).axes) == 1


def test_matrices_outside_the_blocks_are_counted_in_the_caption():
    outside = tuple(a.model_copy(update={"block": None}) if a.block == 0 else a for a in leverage_record().amplitude)

    caption = predicted_leverage(leverage_record(amplitude=outside)).get_supxlabel()

    assert f"{len(ROLES)} matrices outside the blocks are not shown" in caption


def test_files_are_complete_images_and_the_same_every_time(tmp_path):
    first, second = (draw(leverage_record(published=published()), tmp_path / n) for n in ("one", "two"))

    assert list(first) == ["response_curve", "amplitude_profile", "predicted_leverage"]
    for name, path in first.items():
        data = path.read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG")
        assert width >= 900
        assert height >= 500
        assert data == second[name].read_bytes()
        svg = path.with_suffix(".svg").read_bytes()
        assert svg == second[name].with_suffix(".svg").read_bytes()
        assert b"<svg" in svg


def test_a_study_without_figures_writes_none(tmp_path):
    assert draw(leverage_record(means=(), amplitude=()), tmp_path) == {}


def test_a_folder_that_cannot_be_written_to_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(ProbeError, match="cannot write"):
        draw(leverage_record(), tmp_path / "file")


def test_pyplot_is_never_imported_and_the_package_itself_stays_light():
    heavy = "import sys, ternary_probe.reports; assert not {'matplotlib', 'torch', 'rich'} & set(sys.modules)"
    pyplot = "import sys, ternary_probe.reports.figures; assert 'matplotlib.pyplot' not in sys.modules"

    for code in (heavy, pyplot):
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

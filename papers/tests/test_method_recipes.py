"""methods-cifar10 and kin-everywhere: who has which settings, and what the page says about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinfed.algorithms.kin.kin import Kin
from kinfed.config.preset_files import PRESETS, preset_methods
from kinfed.core.registry import Entry
from kinfed.data.examples.batches import LocalTraining
from kinfed_papers import Results, RunPart
from kinfed_papers.part_records import part_config
from kinfed_papers.recipe import SCALES, Scale
from kinfed_papers.recipes import kin_everywhere, methods_cifar10
from kinfed_papers.recipes.common_presets import PRESET, own_defaults, preset_notes


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets of a test in place of those that were searched."""
    text = "[methods.ditto]\nlr = 0.2\nlam = 0.3\n[methods.kin]\nlr = 0.4\nstrength = 5.0\n"
    for family in ("mlp", "cnn"):
        (tmp_path / f"{family}.toml").write_text(text, "utf-8")
    monkeypatch.setitem(PRESETS._entries, PRESET, Entry(PRESET, tmp_path))


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize("scale", SCALES)
def test_all_have_tuned_settings_but_for_kins_own_options(scale: Scale) -> None:
    kin = Kin(training=LocalTraining())
    assert own_defaults("kin") == {"strength": kin.strength}
    for part in kin_everywhere.parts(scale):
        config = part_config(part, None, {})
        assert config.algorithms["ditto"] == {"method": "ditto", "lr": 0.2, "lam": 0.3}
        assert config.algorithms["kin"] == {"method": "kin", "lr": 0.4, **own_defaults("kin")}
        assert config.algorithms["fedrep"] == {"method": "fedrep"}


@pytest.mark.usefixtures("tuned")
def test_the_page_says_which_settings_were_used() -> None:
    settings = {"algorithms": "ditto,apfl", "preset": PRESET}
    notes = preset_notes(
        [RunPart("a", settings), RunPart("again", settings), RunPart("b", settings | {"model": "lstm"})]
    )
    assert notes == [
        "Preset tuned, for mlp: ditto lr=0.2, lam=0.3.",
        "No tuned setting for apfl on mlp: defaults, not on equal terms with methods that have one.",
        "No tuned setting for ditto, apfl on lstm, which belongs to no family: defaults.",
    ]
    assert preset_notes([RunPart("c", {"algorithms": "ditto"})]) == []


@pytest.mark.parametrize("scale", SCALES)
def test_both_partitions_of_cifar10_have_the_same_settings(scale: Scale) -> None:
    one, other = ({k: v for k, v in part.settings.items() if k != "partition"} for part in methods_cifar10.parts(scale))
    assert one == other
    config = part_config(methods_cifar10.parts(scale)[0], None, {})
    assert config.preset is not None
    assert config.preset.missing == ()
    assert config.algorithms.keys() == preset_methods(PRESET, "cnn").keys() == methods_cifar10.METHODS.keys()


def test_notes_of_both_recipes_name_the_preset() -> None:
    for recipe in (kin_everywhere.RECIPE, methods_cifar10.RECIPE):
        assert any(f"{PRESET} setting for" in note or f"Preset {PRESET}, for" in note for note in recipe.notes)


def test_ranks_are_over_seeds_that_all_federations_have_and_least_errors_are_best() -> None:
    rows = list(kin_everywhere.METHODS)

    def measured(metric: str, better: float, seeds: tuple[int, ...]) -> dict[str, dict[str, dict[int, float]]]:
        return {row: {metric: {s: place * better for s in seeds}} for place, row in enumerate(rows)}

    results = Results({
        "iid": measured("personal.accuracy", 1.0, (10, 11)),  # the last is best
        "schools": measured("personal.rmse", 1.0, (10,)),  # the first is
        "foreign": measured("personal.rmse", 1.0, (10,)),  # has no accuracy
    })  # fmt: skip
    ranks = kin_everywhere.ranks(results)
    assert ranks[rows[0]] == {10: (10 + 1) / 2}
    assert ranks[rows[1]] == {10: (9 + 2) / 2}


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_every_federation_has_the_seeds_that_ranks_are_taken_over(scale: Scale) -> None:
    for part in kin_everywhere.parts(scale):
        assert isinstance(part, RunPart)
        assert set(kin_everywhere.SEEDS) - {11} <= set(part.settings["seeds"])

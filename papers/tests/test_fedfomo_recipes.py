"""The recipes of FedFomo: what they would run, what they compare with, and how kin are counted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kinfed.algorithms import make_algorithm
from kinfed.core.options import make_options
from kinfed.data.partitions import PARTITIONS
from kinfed.data.sources import SOURCES
from kinfed.engine.zoo.models import MODELS
from kinfed.records.reader import load_run
from kinfed_papers import Results, RunPart, difference
from kinfed_papers.judge import verdicts
from kinfed_papers.measure import reproduce
from kinfed_papers.part_records import part_config
from kinfed_papers.recipe import SCALES
from kinfed_papers.recipe_page import write_reproduction
from kinfed_papers.recipes import RECIPES, load_recipe
from kinfed_papers.recipes.common_fedfomo import ONE_MODEL, RIVALS, SCORED, scored_accuracy
from kinfed_papers.recipes.fedfomo_exploration import EPSILONS
from kinfed_papers.recipes.fedfomo_exploration import figures as exploration_figures
from kinfed_papers.recipes.fedfomo_exploration import label as exploration_label
from kinfed_papers.recipes.fedfomo_privacy import accountant
from kinfed_papers.result_tables import filled_tables
from kinfed_papers.studies.kinship import differences_of_classes, kinship, top_places

NAMES = tuple(
    f"fedfomo-{what}"
    for what in ("exploration", "foreign", "latent", "pathological", "privacy", "validation", "weights")
)


def test_all_seven_are_listed():
    assert set(NAMES) <= set(RECIPES)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_part_is_a_run_that_could_start(name, scale):
    """Settings, data set, partition, model and all methods' options are accepted; nothing is loaded."""
    parts = [part for part in load_recipe(name).parts(scale) if isinstance(part, RunPart)]
    assert len({part.name for part in parts}) == len(parts) > 0
    for part in parts:
        config = part_config(part, None, {})
        make_options(SOURCES[config.dataset.name].options, config.dataset.options, config.dataset.name)
        make_options(PARTITIONS[config.partition.name].options, config.partition.options, config.partition.name)
        assert config.model.name in MODELS
        for label, options in config.algorithms.items():
            own = {key: value for key, value in options.items() if key != "method"}
            assert make_algorithm(options["method"], config.training, own), label
        assert len(config.seeds) >= (2 if scale == "smoke" else 3)
        assert scale == "smoke" or config.rounds >= 20
        assert scale != "smoke" or config.dataset.name == "digits"


@pytest.mark.parametrize("name", NAMES)
def test_tables_and_their_published_numbers_name_rows_and_columns_that_exist(name):
    recipe = load_recipe(name)
    runs = {part.name: part for scale in SCALES for part in recipe.parts(scale)}
    for table in recipe.tables:
        headings = [column.heading for column in table.columns]
        assert len(set(headings)) == len(headings), table.title
        for column in table.columns:
            assert column.part in runs, (table.title, column.heading)
        for row, heading in table.published:
            assert row in table.rows, (table.title, row)
            assert heading in headings, (table.title, heading)
    for part, method in recipe.method_figures:
        assert method in part_config(runs[part], None, {}).algorithms


@pytest.mark.parametrize("name", NAMES)
def test_claims_survive_that_nothing_was_measured(name):
    said = verdicts(load_recipe(name), Results({}), "small")
    assert {verdict.status for verdict in said} <= {"not judged", "not testable"}


def test_every_published_method_of_table_1_to_5_has_all_its_numbers():
    for name, tables in (("fedfomo-pathological", 1), ("fedfomo-latent", 2), ("fedfomo-foreign", 1)):
        for table in load_recipe(name).tables[:tables]:
            assert len(table.published) == len(table.rows) * len(table.columns) == 11 * len(table.columns)
            assert all(entry.spread is not None for entry in table.published.values())


def test_the_accountant_gives_the_reference_of_the_papers_local_training():
    pytest.importorskip("dp_accounting")
    found = accountant(None, {})["epochs-100"]
    assert found["rdp-2017-1"][0] == pytest.approx(10.63, abs=0.02)
    assert found["rdp-2017-2"][0] == pytest.approx(3.82, abs=0.01)
    assert all(found[f"pld-{noise}"][0] < found[f"rdp-{noise}"][0] < found[f"rdp-2017-{noise}"][0] for noise in (1, 2))


def run_of(folder, affinity, weights=None, groups=(0, 0, 1, 1), target_of=None):
    """A run as far as kinship reads it: one method, one seed, two rounds, the second one given; a class per group."""
    count = len(groups)
    nobody = [[0.0] * count for _ in range(count)]
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"fingerprint": "f", "config": {"rounds": 2, "algorithms": {"fomo": {}}}})
    )
    lines = []
    for number, matrix in ((1, nobody), (2, affinity)):
        method = {"affinity": matrix} | ({} if weights is None else {"weights": weights})
        lines.append(json.dumps({"algorithm": "fomo", "seed": 5, "round": number, "method": method}))
    (folder / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    described = {} if target_of is None else {"target_of": target_of}
    classes = [[int(group == c) for c in range(max(groups) + 1)] for group in groups]
    federation = {
        "names": [str(i) for i in range(count)],
        "num_classes": max(groups) + 1,
        "class_names": None,
        **{split: classes for split in ("train", "val", "test")},
        "groups": list(groups),
        "group_names": None,
        "emd": [0.0] * count,
        "emd_code": [0.0] * count,
        "inputs": {},
        "notes": [],
        "description": described,
    }
    (folder / "federation-5.json").write_text(json.dumps(federation))
    return load_run(folder, "run")


def test_kin_are_counted_by_hand(tmp_path):
    """Clients 0 and 3 have their one kin at the top, 1 and 2 have not: two of four places."""
    affinity = [[9, 3, 1, 0], [0, 9, 1, 0], [0, 5, 9, 1], [0, 1, 2, 9]]
    weights = [[0.5, 0.5, 0, 0], [0, 0.4, 0.6, 0], [0, 0, 1, 0], [0.1, 0, 0.3, 0.6]]
    found = kinship(run_of(tmp_path / "run", affinity, weights))["fomo"]
    assert found["kin.top"] == {5: 0.5}
    assert found["kin.chance"] == {5: pytest.approx(1 / 3)}
    assert found["kin.mixed"] == {5: pytest.approx((0.5 + 0.3) / (0.5 + 0.6 + 0.1 + 0.3))}


def test_with_foreign_targets_kin_are_those_who_train_on_the_target(tmp_path):
    """Targets change groups: client 0 is judged on what 2 and 3 have, and has both at the top."""
    affinity = [[9, 0, 1, 1], [0, 9, 1, 1], [1, 1, 9, 0], [1, 1, 0, 9]]
    run = run_of(tmp_path / "run", affinity, target_of=[2, 3, 0, 1])
    figures = kinship(run)["fomo"]
    assert figures["kin.top"] == {5: 1.0}
    assert figures["kin.early"] == {5: 0.75}  # round 1 of 2: all equal, in order; one of two for clients 0 and 1
    assert figures["kin.chance"] == {5: pytest.approx(2 / 3)}
    assert "kin.mixed" not in figures


def test_differences_of_classes_by_hand(tmp_path):
    """Half of the clients have each class: |1 - 1/2| + |0 - 1/2|; the released code counts the shared class twice."""
    run = run_of(tmp_path / "run", [[0.0] * 4] * 4)
    assert differences_of_classes(run) == {"federation": {"emd": {5: 1.0}, "emd_code": {5: 1.5}}}


def test_methods_without_affinities_and_clients_without_kin_are_left_out(tmp_path):
    matrix = [[float(i == j) for j in range(4)] for i in range(4)]
    assert kinship(run_of(tmp_path / "alone", matrix, groups=(0, 1, 2, 3))) == {}
    run = run_of(tmp_path / "plain", matrix)
    (run.path / "rounds.jsonl").write_text('{"algorithm": "fomo", "seed": 5, "round": 1, "method": {}}\n')
    assert kinship(load_run(run.path, "plain")) == {}


def test_one_model_methods_count_by_the_shared_model(tmp_path):
    costs = {"rounds": 2, "bytes_down": 1, "bytes_up": 1, "seconds": 1.0}
    results = [
        {"algorithm": label, "seed": 3, "personal": {"accuracy": 0.9}, "server": {"accuracy": 0.2}, **costs}
        for label in (*ONE_MODEL, "cfl")
    ]
    (tmp_path / "config.json").write_text(json.dumps({"fingerprint": "f", "config": {"rounds": 2}}))
    (tmp_path / "summary.json").write_text(json.dumps({"results": results}))
    scored = scored_accuracy(load_run(tmp_path, "run"))
    assert all(scored[label][SCORED] == {3: 0.2} for label in ONE_MODEL)
    assert scored["cfl"][SCORED] == {3: 0.9}


def test_differences_are_of_common_seeds_only():
    assert difference({0: 0.5, 1: 0.7}, {1: 0.4, 2: 0.1}) == {1: pytest.approx(0.3)}


def test_a_recipe_from_runs_to_page(tmp_path):
    """fedfomo-latent at half its smoke scale: tables, claims, kin and page, and nothing is run twice."""
    recipe = load_recipe("fedfomo-latent")
    labels = ("local", "fedavg", "fedfomo-5")
    part = recipe.parts("smoke")[0]
    chosen = {label: part.settings["algorithms"][label] for label in labels}
    part = replace(part, settings={**part.settings, "rounds": 2, "algorithms": chosen})
    small = replace(recipe, parts=lambda scale: [part])
    done = reproduce(small, "smoke", tmp_path / "out", settings={"workers": 1})
    table = filled_tables(done)[0]
    assert [name for name, _ in table.rows] == ["Local training", "FedAvg", "FedFomo, n = 5"]
    ours = done.results.get("cifar10-5", "fedavg", SCORED)
    assert ours == done.results.get("cifar10-5", "fedavg", "server.accuracy")
    assert 0 <= min(done.results.get("cifar10-5", "fedfomo-5", "kin.top").values()) <= 1
    assert set(done.results.get("cifar10-5", "federation", "emd_code")) == {0, 1}
    judged = {verdict.claim: verdict.status for verdict in verdicts(small, done.results, "small")}
    above_alone = next(claim for claim in judged if claim.startswith("FedFomo (n = 5) above every client alone"))
    assert judged[above_alone] in ("holds", "does not hold", "unknown")
    page = write_reproduction(done)
    assert "Who helps whom" in page.read_text("utf-8")
    assert reproduce(small, "smoke", tmp_path / "out", settings={"workers": 1}).parts == done.parts


def test_own_figures_draw_what_was_measured():
    measured = {"m5-e0": {"personal.accuracy": {0: 0.5, 1: 0.7}}, "local": {"personal.accuracy": {0: 0.4}}}
    over_epsilon, over_models = exploration_figures(Results({"cifar10": measured}), {})
    line = next(trace for trace in over_epsilon.figure.data if trace["name"] == "M = 5")
    assert (line["x"], line["y"]) == ([0.0], [60.0])
    level = over_models.figure.data[-1]
    assert (level["name"], level["y"]) == ("local training", [40.0, 40.0])


def test_the_best_rivals_have_the_papers_work_too() -> None:
    """Run apart, on the same clients in the same way: but for the methods, every setting is that of the others."""
    parts = {part.name: part for part in load_recipe("fedfomo-work").parts("small")}
    rivals, others = parts["augmented-rivals"], parts["augmented"]
    assert rivals.merge_into == "augmented"
    assert {**rivals.settings, "algorithms": None} == {**others.settings, "algorithms": None}
    assert list(rivals.settings["algorithms"]) == ["perfedavg", "pfedme"]
    assert "steps" not in rivals.settings["algorithms"]["pfedme"]


def test_the_effect_of_epsilon_is_the_slope_over_all_of_it():
    """With M = 2 accuracy rises by 0.01 from each ε to the next, 0.03 in all; with M = 5 and 10 it zigzags, by which
    the line through (0, 0.02, 0, 0.02) rises by 3 · 0.004: on average (0.03 + 0.012 + 0.012) / 3 = 0.018."""
    steady, zigzag = (0.0, 0.01, 0.02, 0.03), (0.0, 0.02, 0.0, 0.02)
    measured = {
        exploration_label(m, e): {"personal.accuracy": {7: 0.5 + gain}}
        for m, gains in ((2, steady), (5, zigzag), (10, zigzag))
        for e, gain in zip(EPSILONS, gains, strict=True)
    }
    (claim,) = (c for c in load_recipe("fedfomo-exploration").claims if c.text.startswith("No consistent effect"))
    margins = claim.margins(Results({"cifar10": measured}))
    assert margins == {"a gain": {7: pytest.approx(0.018)}, "a loss": {7: pytest.approx(-0.018)}}


def test_rivals_are_all_methods_but_fedfomo():
    assert len(RIVALS) == 9
    assert not any(label.startswith("fedfomo") for label in RIVALS)


def test_top_places_are_given_for_every_recorded_round(tmp_path):
    affinity = [[9, 3, 1, 0], [3, 9, 1, 0], [0, 1, 9, 5], [0, 1, 2, 9]]
    run = run_of(tmp_path / "run", affinity)
    assert list(top_places(run, run.trials[0])) == [1, 2]
    assert top_places(run, run.trials[0])[2] == 1.0

"""The arena on a suite of two small federations: equal work, entries that are run again, forgeries that are refused."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import kinfed
from realdata import real_data

from kinfed.algorithms import ALGORITHMS
from kinfed.analysis import rankings
from kinfed.arena import Standings, arena_board, read_entry, run_entries, verify
from kinfed.arena.conclusions import stability
from kinfed.arena.contest import GradientWork, SeededFederation, drawn_settings
from kinfed.arena.entries import contradictions
from kinfed.arena.suites import suite
from kinfed.core import plugins
from kinfed.errors import ConfigError, DataError

HALFWAY = Path(__file__).parents[2] / "examples" / "halfway.py"
TEXT = """
tolerance = 0.05
references = ["local", "fedavg"]
[budgets]
lite = { seeds = [0, 1], trials = 2 }
core = { seeds = [0, 1], trials = 2 }
full = { seeds = [0, 1], trials = 2 }
[settings]
model = "mlr"
steps = 4
batch = 5
participation = 1.0
validation = 0.2
metric = "accuracy"
[[federations]]
name = "codes"
axis = "contradicting clients"
kind = "images"
subset = "lite"
rounds = 3
settings = { dataset = "digits", partition = { name = "hidden_groups", by = "labels" }, clients = 6 }
[[federations]]
name = "new"
axis = "held-out clients"
kind = "images"
subset = "lite"
rounds = 3
newcomers = 2
settings = { dataset = "digits", partition = "iid", clients = 6 }
"""


@pytest.fixture(scope="module")
def own_suite(tmp_path_factory):
    """A frozen suite in a file, by its name."""
    file = tmp_path_factory.mktemp("suite") / "small.toml"
    file.write_text(TEXT)
    text = TEXT
    for one in suite(str(file)).all_federations:
        digests = json.dumps([one.unchecked(seed).digest() for seed in (0, 1)])
        baselines = [one.baseline(seed) for seed in (0, 1)]
        line = f'name = "{one.name}"\n'
        text = text.replace(line, f"{line}digests = {digests}\nbaselines = {baselines}\n")
    file.write_text(text)
    suite.cache_clear()
    return str(file)


@pytest.fixture(scope="module")
def entries(own_suite, tmp_path_factory):
    """Entries of the references, Ditto, kin and a plugin."""
    out = tmp_path_factory.mktemp("entries")
    run_entries(["ditto", "kin", f"{HALFWAY}:Halfway"], "lite", out, suite_name=own_suite)
    yield out
    ALGORITHMS.unregister("halfway")
    plugins._loaded.clear()


@pytest.fixture
def entry_file(entries, tmp_path):
    """A copy of Ditto's entry, to be changed, and its content."""
    file = tmp_path / "entry.json"
    shutil.copy(entries / "ditto" / "entry.json", file)
    return file


def forged(file, change):
    """The entry with a change, sealed again as its maker would."""
    entry = read_entry(file)
    replace(entry, federations={**entry.federations, "codes": change(entry.federations["codes"])}).write(file)
    return file


def scored(one, score):
    return replace(one, cells={s: replace(c, scores=(score, *c.scores[1:])) for s, c in one.cells.items()})


def test_no_method_takes_more_gradients_than_the_budget(own_suite, entries):
    for name in ("local", "fedavg", "ditto", "kin", "halfway"):
        entry = read_entry(entries / name / "entry.json")
        for one in suite(own_suite).federations("lite"):
            for seed, cell in entry.federations[one.name].cells.items():
                assert cell.gradients <= SeededFederation(one, seed).budget
                assert cell.rounds == (3 if name in ("local", "fedavg") else 2)  # of six clients, 20 gradients a step


def test_rounds_within_a_budget_go_on_from_what_was_counted():
    assert GradientWork((10, 10), 20).rounds_within(55) == 5
    assert GradientWork((10, 25), 35).rounds_within(65) == 5  # 15 of the last are for the end
    assert GradientWork((90, 10, 10), 110).rounds_within(200) == 12  # a dear first round is paid once
    assert GradientWork((10, 10, 10), 30).rounds_within(20) == 2
    assert GradientWork((0, 0), 0).rounds_within(5) > 1000


def test_new_clients_alone_are_judged_and_the_rest_trains(own_suite, entries):
    one = suite(own_suite).federations("lite")[1]
    assert SeededFederation(one, 0).data.num_clients == 4
    for name in ("local", "ditto", "fedavg"):
        scores = read_entry(entries / name / "entry.json").federations["new"].cells[0].scores
        assert len(scores) == 2


def test_settings_are_drawn_by_names_alone(own_suite):
    one, budget = suite(own_suite).federations("lite")[0], suite(own_suite).budgets["lite"]
    first, second = drawn_settings("ditto", one, budget)
    assert first == {}
    assert second.keys() == {"lam", "lr"}
    assert list(drawn_settings("ditto", one, budget)) == [first, second]
    assert list(drawn_settings("ditto", replace(one, name="other"), budget))[1] != second


def test_all_methods_try_the_same_shares_of_their_ranges(own_suite):
    one, budget = suite(own_suite).federations("lite")[0], replace(suite(own_suite).budgets["lite"], trials=6)
    rates = {name: [drawn.get("lr") for drawn in drawn_settings(name, one, budget)] for name in ("ditto", "fedrep")}
    assert rates["ditto"] == rates["fedrep"]
    parts = [int(5 * math.log(rate / 1e-3) / math.log(1e3)) for rate in rates["ditto"][1:]]
    assert sorted(parts) == [0, 1, 2, 3, 4]  # of the range from 0.001 to 1
    names = {name: list(drawn_settings(name, one, budget))[1] for name in ("pfedme", "cgpfl")}
    assert names["pfedme"].items() <= names["cgpfl"].items()


def test_a_run_that_was_stopped_goes_on_and_is_the_same(own_suite, entries, tmp_path):
    folder, said = tmp_path / "out", []

    def say(sentence):
        said.append(sentence)
        if len(said) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_entries(["local"], "lite", folder, suite_name=own_suite, say=say)
    run_entries(["local"], "lite", folder, suite_name=own_suite, say=said.append)
    assert len([sentence for sentence in said if sentence.startswith("fedavg in codes")]) == 1
    assert [read_entry(place / "local" / "entry.json").digest for place in (folder, entries)] == [
        read_entry(entries / "local" / "entry.json").digest
    ] * 2


def test_an_honest_entry_is_verified_bit_for_bit(entries):
    found = verify(entries / "ditto" / "entry.json", cells=3, draw=1)
    assert found.exact
    assert found.holds
    assert len(found.drawn) == 3
    assert found.catches(1.0) == 1.0
    assert found.catches(0.25) == pytest.approx(3 / 4)  # one of four cells, and three of them drawn
    assert found.catches_tried(0.5) == 1  # two of four settings, and three of them drawn


def test_scores_that_were_not_reached_are_refused(entry_file):
    def better(one):
        cells = {seed: replace(c, scores=tuple(s + 0.02 for s in c.scores)) for seed, c in one.cells.items()}
        return replace(one, cells=cells)

    found = verify(forged(entry_file, better), cells=4, draw=0)
    assert not found.holds
    assert "other scores" in " ".join(found.differences)


def test_settings_of_ones_own_are_refused(entry_file):
    def picked(one):
        trials = (one.trials[0], replace(one.trials[1], settings={"lam": 0.123, "lr": 0.1}, value=1.0))
        return replace(one, trials=trials)

    found = verify(forged(entry_file, picked), cells=4, draw=0)
    assert "the settings that were tried" in " ".join(found.differences)


def test_another_choice_among_the_settings_is_refused(entry_file):
    """What is best on test rows, by a false value on validation rows; the cells are those of an honest run."""

    def chosen(one):
        return replace(one, trials=(one.trials[0], replace(one.trials[1], value=0.999)))

    found = verify(forged(entry_file, chosen), cells=4, draw=0)
    assert [text for text in found.differences if "not 0.999" in text]


def test_a_processor_that_nobody_has_excuses_no_lead(entry_file):
    """Every cell within the tolerance of 0.05, and all in one direction."""
    entry = read_entry(entry_file)
    machine, lifted = {**entry.machine, "processor": "another"}, {}
    for spec in suite(entry.suite).federations("lite"):
        one = entry.federations[spec.name]
        cells = {
            seed: replace(cell, scores=tuple(score + 0.04 * (1 - spec.baselines[seed]) for score in cell.scores))
            for seed, cell in one.cells.items()
        }
        lifted[spec.name] = replace(one, cells=cells)
    replace(entry, federations=lifted, machine=machine).write(entry_file)
    found = verify(entry_file, cells=4, draw=0)
    assert not found.exact
    assert found.differences == ("the entry is +0.040 of skill from what was run, mean over 4 cells",)
    replace(entry, machine=machine).write(entry_file)
    assert verify(entry_file, cells=4, draw=0).holds


def test_nobody_takes_the_name_of_another(entry_file):
    entry = read_entry(entry_file)
    replace(entry, title="Kin").write(entry_file)
    with pytest.raises(DataError, match="calls itself 'Kin', and ditto is Ditto"):
        verify(entry_file)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda one: replace(one, cells={0: one.cells[0]}), "all of"),
        (lambda one: replace(one, trials=(*one.trials, *one.trials)), "4 trials"),
        (lambda one: replace(one, trials=one.trials[1:]), "trials"),
        (lambda one: replace(one, cells={s: replace(c, rounds=30) for s, c in one.cells.items()}), "more rounds"),
        (lambda one: replace(one, refused="I would rather not"), "it is refused and has scores"),
        (lambda one: scored(one, 5.0), "no client can have of accuracy"),
        (lambda one: scored(one, -0.1), "no client can have of accuracy"),
    ],
)
def test_what_contradicts_itself_is_no_entry(entry_file, change, sentence):
    with pytest.raises(DataError, match=sentence):
        read_entry(forged(entry_file, change))


def test_an_edited_file_is_refused(entry_file, entries):
    record = json.loads(entry_file.read_text())
    record["federations"]["codes"]["cells"]["0"]["scores"][0] = 1.0
    entry_file.write_text(json.dumps(record))
    with pytest.raises(DataError, match="was changed after it was made"):
        read_entry(entry_file)
    entry = read_entry(entries / "ditto" / "entry.json")
    part = {"codes": entry.federations["codes"]}
    assert "others" in contradictions(replace(entry, federations=part), suite(entry.suite))
    assert "another" in contradictions(replace(entry, suite_digest="0" * 32), suite(entry.suite))


def test_to_say_that_a_method_cannot_run_is_checked(entry_file):
    found = verify(forged(entry_file, lambda one: type(one)(refused="too hard")), cells=4, draw=0)
    assert "and it can" in " ".join(found.differences)


def test_code_of_strangers_is_run_only_on_request(entries, tmp_path):
    file = entries / "halfway" / "entry.json"
    with pytest.raises(ConfigError, match="--trust-code"):
        verify(file)
    assert verify(file, cells=1, draw=0, plugin=HALFWAY).holds
    other = tmp_path / "halfway.py"
    other.write_text(HALFWAY.read_text() + "\n# another\n")
    with pytest.raises(DataError, match="is not the code"):
        verify(file, plugin=other)


def test_standings_by_hand(entries):
    standings = Standings(tuple(read_entry(file) for file in sorted(entries.rglob("entry.json"))))
    local = standings.skills["local"]["codes"]
    one = standings.federations[0]
    cell = standings.by_method["local"].federations["codes"].cells[1]
    assert local[1] == pytest.approx((sum(cell.scores) / 6 - one.baselines[1]) / (1 - one.baselines[1]))
    best = max(sum(standings.skills[name]["codes"].values()) / 2 for name in ("local", "fedavg"))
    own = sum(standings.skills["ditto"]["codes"].values()) / 2
    assert standings.regret_in("ditto", ["codes"]).mean == pytest.approx(best - own)
    assert standings.hurt("local").share == 0
    assert standings.work("fedavg") == 1
    assert standings.work("ditto") == pytest.approx(4 / 3)  # two rounds of two gradients for three of one


def test_entries_stand_beside_each_other_once_and_with_the_references(entries):
    known = [read_entry(file) for file in sorted(entries.rglob("entry.json"))]
    with pytest.raises(ConfigError, match="enters a subset once"):
        Standings((*known, known[0]))
    with pytest.raises(ConfigError, match="have no entry here"):
        Standings(tuple(entry for entry in known if entry.method != "local"))


def test_the_board_says_first_what_speaks_against_kin(entries):
    page = arena_board(entries)
    assert page.sentences[0].startswith("Against kin")
    assert "Halfway" in page.html
    assert page.markdown.count("| Halfway |") == 2
    assert "critical difference" in page.html


def test_the_board_ranks_who_can_run_and_names_who_cannot_or_is_missing(entries, tmp_path):
    out = tmp_path / "arena"
    shutil.copytree(entries, out)
    entry = read_entry(out / "kin" / "entry.json")
    nothing = {name: type(one)(refused="no rows for it") for name, one in entry.federations.items()}
    (out / "cox").mkdir()
    replace(entry, method="cox", title=ALGORITHMS["cox"].title, federations=nothing).write(out / "cox" / "entry.json")
    page = arena_board(out)
    assert "so have no rank: cox (no rows for it)." in page.sentences[-2]
    assert "without an entry: fedavg_smooth, " in page.sentences[-1]
    assert not {"cox", "kin", "halfway"} & set(page.sentences[-1].rpartition(": ")[2].strip(".").split(", "))
    families = {str(row[0]): str(row[1]) for row in page.tables[1].rows}
    assert (families["One model for all, and none"], families["Methods of others"]) == ("2", "1")


def test_ranks_in_what_a_larger_subset_adds(entries, monkeypatch):
    standings = Standings(tuple(read_entry(file) for file in sorted(entries.rglob("entry.json"))))
    first, second = standings.federations
    monkeypatch.setattr(Standings, "federations", (first, replace(second, subset="core")))
    ranks = [rankings.mean_ranks(standings.only([one.name])) for one in (first, second)]
    expected = f"in the 1 that lite adds with {rankings.rank_correlation(*ranks):.2f}."
    assert [sentence for sentence in stability(standings) if sentence.endswith(expected)]


def test_the_commands(own_suite, entries, entry_file, tmp_path):
    out = tmp_path / "arena"
    shutil.copytree(entries, out)
    done = kinfed("arena", "run", "ditto", "--out", out, "--suite", own_suite, cwd=tmp_path)
    assert "of clients have a worse model" in done.stdout
    assert "Skill by federation" in (out / "ditto" / "entry.html").read_text()
    assert "verified" in kinfed("arena", "verify", out / "ditto" / "entry.json", "--cells", "1", cwd=tmp_path).stdout
    file = forged(entry_file, lambda one: type(one)(refused="too hard"))
    refused = kinfed("arena", "verify", file, "--cells", "4", cwd=tmp_path)
    assert (refused.returncode, "does not hold" in refused.stdout) == (1, True)
    assert "wrote" in kinfed("arena", "board", out, "--out", "b.html", cwd=tmp_path).stdout
    assert "unknown" in kinfed("arena", "run", "dito", "--out", out, cwd=tmp_path).stderr


def test_the_arena_is_frozen():
    """Entries name these digests; what should be otherwise is another suite."""
    assert {subset: suite().digest(subset) for subset in ("lite", "core", "full")} == {
        "lite": "ebccaa1f4b3be0e2992b7ada94cf9017",
        "core": "d722be7cfa85aa468b520a710301ddca",
        "full": "40534812b8798ff24b5f62bd5dd02a01",
    }
    one = suite().federations("lite")[3]
    assert one.federation(1).num_clients == 20


@pytest.mark.parametrize(
    ("federation", "folder"),
    [("schools", "exam65_london"), ("hospitals", "heart_disease"), ("districts", "contraception")],
)
def test_tables_of_the_suite_are_read_as_they_were(federation, folder, monkeypatch):
    """What a reader of tables does otherwise by default is no longer the federation that entries name."""
    monkeypatch.setenv("KINFED_DATA", str(real_data(folder)))
    (one,) = (one for one in suite().federations("full") if one.name == federation)
    assert one.federation(0).num_clients > 3

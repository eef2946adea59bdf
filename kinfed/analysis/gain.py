"""The gain from federating that clients can expect: errors from a table of clients' estimates, or
from the estimates of a Self-FL run.

A table has one row per client:

    client      a name
    estimate    what the client learned alone; a vector is given as estimate_0, estimate_1, ...
    variance    of ONE example about the client's own value, not of the estimate (for vectors the trace: the sum
                over coordinates)
    n           number of examples behind the estimate

so the estimate itself has the variance s_m = variance / n. In the two-level model (``theory.two_level``) this and s0,
the variance between clients' true values, decide the expected squared error of whatever a client could do: keep
its own estimate (s_m), take the one model for all (θ^G), Self-FL's personal estimate with its published weights,
or the exact posterior mean. For Self-FL this is the true error of its Equation (3), not the v^FL claimed there,
which takes the client for an average one: where clients differ much, it is worse than learning alone.

All errors are expectations if the model holds and s0 is right. With s0 estimated from the same table they are a
little too good: simulated with 10 to 200 examples per client and s0 = 0.004, 2.5 times the mean s_m, the exact
estimate's true error was 36% above the one reported for 5 clients, 7% for 20, 2% for 100. For a cautious answer
run it again with s0 at the upper end of its range.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from kinfed.core import storage
from kinfed.errors import ConfigError, DataError
from kinfed.records import RunFiles
from kinfed.theory import Numbers, Spread, TwoLevel, estimate_spread

Change = Literal["better", "same", "worse"]


@dataclass(frozen=True)
class ClientGain:
    """Expected squared errors about client m's true value, for each thing it could do."""

    client: str
    n: int
    alone: float  # z_m: s_m
    one_for_all: float  # θ^G
    paper: float  # θ^FL (3), true error
    paper_claim: float  # θ^FL (3), the error v^FL the paper states
    exact: float  # posterior mean, the least possible
    with_paper: Change  # against alone
    with_exact: Change  # against alone; never worse

    @property
    def saved(self) -> float:
        """Share of the error alone that federating saves at best: the weight of the others in the posterior mean."""
        return 1 - self.exact / self.alone


@dataclass(frozen=True)
class GainReport:
    rows: tuple[ClientGain, ...]  # in the order given
    spread: Spread
    margin: float  # changes of less than this share of the error alone count as "same"

    @property
    def gaining(self) -> tuple[str, ...]:
        return tuple(row.client for row in self.rows if row.with_exact == "better")

    @property
    def harmed_by_paper(self) -> tuple[str, ...]:
        return tuple(row.client for row in self.rows if row.with_paper == "worse")


def gain_from_arrays(
    estimate: Numbers, variance: Numbers, n: Numbers, *, clients: Sequence[str] | None = None,
    s0: float | None = None, margin: float = 0.05,
) -> GainReport:  # fmt: skip
    """Expected errors from estimate [M] or [M, d], variance of one example [M] (trace) and number of examples n [M].

    s0 is estimated unless given. For vectors a given s0 is a trace, as variance is.
    """
    z, v2, count = (torch.as_tensor(x, dtype=torch.float64) for x in (estimate, variance, n))
    names = [str(i) for i in range(v2.numel())] if clients is None else [str(name) for name in clients]
    _check(names, z, v2, count)
    if s0 is not None and not s0 >= 0:
        raise ConfigError(f"s0, the variance between clients, must be 0 or more; got {s0}")
    if not 0 <= margin < 1:
        raise ConfigError(f"margin is a share of the error alone, 0 <= margin < 1; got {margin}")

    spread = estimate_spread(z, v2 / count) if s0 is None else Spread(float(s0), known=True)
    model = TwoLevel(z, v2 / count, spread.s0)
    columns = (model.s, model.mse_global, model.mse, model.v_FL, model.exact.mse)
    rows = []
    for i, name in enumerate(names):
        alone, one_for_all, paper, claim, exact = (float(column[i]) for column in columns)
        changes = _change(paper, alone, margin), _change(exact, alone, margin)
        rows.append(ClientGain(name, int(count[i]), alone, one_for_all, paper, claim, exact, *changes))
    return GainReport(tuple(rows), spread, margin)


def gain_from_table(path: str | Path, *, s0: float | None = None, margin: float = 0.05) -> GainReport:
    """``gain_from_arrays`` of a CSV or Parquet file with the columns described at the head of this file."""
    table = _read(Path(path))
    estimates = _estimate_columns(table, path)
    for name in ("client", *estimates, "variance", "n"):
        if (count := table.column_names.count(name)) != 1:
            raise DataError(
                f"{path} must have one column {name}, it has {count or 'none'}; "
                f"its columns are {', '.join(table.column_names)}"
            )
    _require_two(table.num_rows)
    clients = _names(table, path)
    z = torch.stack([_numbers(table, name, clients, path) for name in estimates], -1)
    variance, n = (_numbers(table, name, clients, path) for name in ("variance", "n"))
    z = z[:, 0] if estimates == ["estimate"] else z
    return gain_from_arrays(z, variance, n, clients=clients, s0=s0, margin=margin)


def gain_from_run(
    folder: Path, algorithm: str | None = None, seed: int | None = None, *, s0: float | None = None,
    margin: float = 0.05,
) -> GainReport:  # fmt: skip
    """``gain_from_arrays`` of a run that holds a Self-FL method; s0 is its last σ_0² unless given.

    The run's own estimates stand for the two-level model's quantities: a client's last model for z_m, its uncertainty
    σ_m² (movement of its models over the rounds) for s_m, σ_0² for s0. They measure the trajectory of training as much
    as the sampling of data (docs/selffl.md), so the result says what Self-FL believed, not what is true."""
    run = RunFiles(folder)
    records = [
        record
        for record in run.records()
        if (algorithm is None or record["algorithm"] == algorithm)
        and (seed is None or record["seed"] == seed)
        and isinstance(clients := record.get("method", {}).get("clients"), dict)
        and "sigma_m_sq" in clients
        and (s0 is not None or "sigma0_sq" in record["method"])  # Self-FL's control estimates none
    ]
    if not records:
        wanted = algorithm or "a Self-FL method"
        raise ConfigError(f"{folder} holds no evaluated round of {wanted} with client variances; run selffl first")
    algorithm, seed = records[0]["algorithm"], records[0]["seed"]
    last = [record for record in records if (record["algorithm"], record["seed"]) == (algorithm, seed)][-1]
    where = f"{folder}, round {last['round']}"
    variances = storage.as_record(list[float | None], last["method"]["clients"]["sigma_m_sq"], f"{where}: sigma_m_sq")
    variance = torch.tensor([-1.0 if value is None else value for value in variances], dtype=torch.float64)
    known = (variance > 0).nonzero().squeeze(1)
    if len(known) < 2:
        raise ConfigError(
            f"only {len(known)} client(s) of {algorithm} trained often enough to have a variance, and two are needed; "
            "run more rounds"
        )
    data = run.description(seed)
    count = torch.tensor(data.sizes(), dtype=torch.float64)
    models, names = run.models(algorithm, seed).personal[known], [data.names[int(k)] for k in known]
    s0 = storage.as_record(float, last["method"]["sigma0_sq"], f"{where}: sigma0_sq") if s0 is None else s0
    return gain_from_arrays(models, (variance * count)[known], count[known], clients=names, s0=s0, margin=margin)


# ---- what people see ----


def render(report: GainReport, limit: int = 40) -> Table:
    """Expected squared errors as a table, most saved first; beyond ``limit`` rows the middle is left out."""
    table = Table(title="Expected squared error per client", title_justify="left")
    table.add_column("client")
    for heading in ("n", "alone", "one for all", "Self-FL", "(claimed)", "exact", "saved"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    rows = [_cells(row) for row in sorted(report.rows, key=lambda row: -row.saved)]
    if len(rows) > limit:
        head, tail = (limit + 1) // 2, len(rows) - limit // 2
        rows[head:tail] = [[Text(f"... {tail - head} more")]]
    for cells in rows:
        table.add_row(*cells)
    return table


def _cells(row: ClientGain) -> list[Text]:
    if row.with_exact == "same":
        verdict = Text("little to gain", style="dim")
    elif row.with_paper == "better":
        verdict = Text("gains", style="green")
    else:
        verdict = Text("gains with exact weights only", style="yellow")
    errors = [Text(f"{e:.3g}") for e in (row.alone, row.one_for_all, row.paper, row.paper_claim, row.exact)]
    errors[2].style = "red" if row.with_paper == "worse" else ""
    return [Text(row.client), Text(str(row.n)), *errors, Text(f"{row.saved:.0%}"), verdict]


def summary(report: GainReport) -> str:
    """One line for people who will not read the table."""
    count, gaining, harmed = len(report.rows), len(report.gaining), len(report.harmed_by_paper)
    saved = 1 - sum(row.exact for row in report.rows) / sum(row.alone for row in report.rows)
    who = "No client gains" if gaining == 0 else f"{gaining} of {count} clients gain{'s' if gaining == 1 else ''}"
    line = f"{who} {report.margin:.0%} or more by federating; over all, expected squared error falls by {saved:.0%}"
    if harmed:
        line += f"; Self-FL's published weights would make {harmed} of {count} worse off than alone"
    spread, origin = report.spread, "given" if report.spread.known else "estimated"
    if spread.low is not None and spread.high is not None:
        origin = f"estimated, 95% range {spread.low:.3g} to {spread.high:.3g}"
    return f"{line}. Variance between clients s0 = {spread.s0:.3g} ({origin})."


# ---- reading and checking ----


def _change(error: float, alone: float, margin: float) -> Change:
    return "better" if error < alone * (1 - margin) else "worse" if error > alone * (1 + margin) else "same"


def _check(names: Sequence[str], z: Tensor, v2: Tensor, count: Tensor) -> None:
    M = len(names)
    if z.dim() not in (1, 2) or len(z) != M or v2.shape != (M,) or count.shape != (M,):
        raise DataError(
            "wanted one estimate (a number or a row), one variance and one n per client; "
            f"got {M} clients, estimates {list(z.shape)}, variances {list(v2.shape)}, n {list(count.shape)}"
        )
    _require_two(M)
    if repeated := [name for name, rows in Counter(names).items() if rows > 1]:
        raise DataError(f"every client must have one row; there is more than one for {_some(repeated)}")
    finite = z.isfinite() if z.dim() == 1 else z.isfinite().all(-1)
    whole = count.isfinite() & (count >= 1) & (count == count.round())
    for right, wanted in (
        (finite, "every estimate must be a finite number"),
        (v2.isfinite() & (v2 > 0), "every variance (of one example) must be finite and above 0"),
        (whole, "every n must be a whole number of examples, 1 or more"),
    ):
        if not right.all():
            wrong = [name for name, fine in zip(names, right.tolist(), strict=True) if not fine]
            raise DataError(f"{wanted}; it is not for {_some(wrong)}")


def _require_two(clients: int) -> None:
    if clients < 2:
        raise DataError(f"to gain from others there must be at least two clients; got {clients}")


def _some(names: Sequence[str]) -> str:
    first = ", ".join(names[:3])
    return f"client {first}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read(path: Path) -> Any:
    """pyarrow's table; client names in a CSV stay text, so that 007 is not 7."""
    kind = path.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise DataError(f"wanted a .csv or .parquet table of estimates; got {path}")
    try:
        if kind == ".parquet":
            return pa.parquet.read_table(path)
        as_text = pa.csv.ConvertOptions(column_types={"client": pa.string()})
        return pa.csv.read_csv(path, convert_options=as_text)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _estimate_columns(table: Any, path: str | Path) -> list[str]:
    vector = [name for name in table.column_names if name.removeprefix("estimate_").isdigit() and "_" in name]
    if not vector:
        return ["estimate"]
    if "estimate" in table.column_names:
        raise DataError(f"{path} has both estimate and {vector[0]}; keep one number or one vector per client")
    wanted = [f"estimate_{i}" for i in range(len(vector))]
    if set(vector) != set(wanted):
        raise DataError(f"{path} must number its estimates {wanted[0]} to {wanted[-1]}; it has {', '.join(vector)}")
    return wanted


def _names(table: Any, path: str | Path) -> list[str]:
    names = [name or "" for name in table.column("client").cast(pa.string()).to_pylist()]
    if "" in names:
        raise DataError(f"{path}: row {names.index('') + 1} has no client name")
    return names


def _numbers(table: Any, name: str, clients: Sequence[str], path: str | Path) -> Tensor:
    """A column of a table as float64 [K], one number for every client."""
    column = table.column(name)
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_null)
    if not any(kind(column.type) for kind in kinds):
        raise DataError(f"{path}: column {name} must hold numbers; it holds {column.type}")
    values = column.cast(pa.float64(), safe=False).to_pylist()  # of integers beyond 2^53 the last digits are lost
    if missing := [client for client, value in zip(clients, values, strict=True) if value is None]:
        raise DataError(f"{path}: column {name} is empty for {_some(missing)}")
    return torch.tensor(values, dtype=torch.float64)

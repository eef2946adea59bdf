"""Parquet files of a data set: found in the data folder, or fetched into it from the Hugging Face hub; decoded once.

Layout: <data folder>/<data set>/<split>-00000-of-00001.parquet, the files of the hub as they are. Files in
subfolders (as `hf download --local-dir` leaves them) are found too. The data folder is the one given,
else $KINFED_DATA, else `data` in the cache folder ($KINFED_CACHE, else ~/.cache/kinfed).
"""

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from kinfed.core import cache
from kinfed.errors import DataError, MissingDataError

log = logging.getLogger(__name__)

CONVERTED = "refs/convert/parquet"
_CACHE_FORMAT = "decoded-1"
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclass(frozen=True)
class ParquetSet:
    """Place of a data set: folder, the splits in its file names, and its home on the hub if it has one."""

    folder: str
    splits: tuple[str, ...]
    repository: str | None = None
    advice: str = ""  # for the error where it is missing and cannot be fetched
    within: str = ""  # folder of the repository that holds the files, where it holds several versions


def data_folder(configured: Path | None) -> Path:
    if configured is not None:
        return configured.expanduser()
    if named := os.environ.get("KINFED_DATA"):
        return Path(named).expanduser()
    return cache.cache_folder() / "data"


def obtain(wanted: ParquetSet, data_dir: Path | None) -> dict[str, list[Path]]:
    """The files of every split, fetched first where some are missing."""
    folder = data_folder(data_dir) / wanted.folder
    splits = _find(folder, wanted.splits)
    lacking = _lacking(splits)
    if not lacking:
        return splits
    place = f"put {' and '.join(lacking)} into {folder}"
    remedy = f"{place}; {wanted.advice}" if wanted.advice else place
    if wanted.repository is None:
        raise MissingDataError(f"data set files are missing; {remedy}")
    try:
        _fetch(wanted, folder)
    except Exception as error:  # the hub raises errors of several libraries; all mean that nothing came
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MissingDataError(
            f"data set files are missing and could not be fetched from hub data set {wanted.repository} "
            f"({reason}); {remedy}"
        ) from error
    splits = _find(folder, wanted.splits)
    if lacking := _lacking(splits):
        raise DataError(f"hub data set {wanted.repository} did not contain {' and '.join(lacking)}; {place} by hand")
    return splits


def read_parquet(file: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        present = pq.read_schema(file).names
        if lacking := [name for name in columns or [] if name not in present]:
            problem = f"{file} has no column {' or '.join(lacking)}; it has {', '.join(present)}"
            raise DataError(f"{problem}. Is it a file of this data set?")
        return pq.read_table(file, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read {file} as Parquet: {error}; fetch it again") from error


def read_complete(name: str, files: Iterable[Path], columns: list[str]) -> pa.Table:
    """The columns of all files of a data set, none of whose cells may be empty."""
    table = pa.concat_tables([read_parquet(file, columns) for file in files])
    for column in columns:
        if table[column].null_count:
            raise DataError(f"{name}: column {column} has empty cells; fetch the files again")
    return table


def cached(name: str, files: Iterable[Path], make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of make(), kept in the cache folder for as long as the files keep names, sizes and times."""
    return cache.cached("decoded", f"{name}-{cache.files_identity(files, _CACHE_FORMAT)}", make)


def _find(folder: Path, splits: tuple[str, ...]) -> dict[str, list[Path]]:
    files = sorted(folder.rglob("*.parquet")) if folder.is_dir() else []
    return {split: [file for file in files if split_of(file) == split] for split in splits}


def split_of(file: Path) -> str:
    """train-00000-of-00001.parquet, or train/0000.parquet as in the hub's own conversions."""
    return file.parent.name if file.stem.isdigit() else _SHARD.sub("", file.stem)


def _lacking(splits: dict[str, list[Path]]) -> list[str]:
    """Names of files that should be there: whole splits, or shards of a split that says how many it has."""
    lacking = []
    for split, files in splits.items():
        if not files:
            lacking.append(f"{split}-*.parquet")
        shards = [match for file in files if (match := _SHARD.search(file.stem))]
        present = {int(match[1]) for match in shards}
        for total in sorted({int(match[2]) for match in shards}):
            lacking += [f"{split}-{i:05d}-of-{total:05d}.parquet" for i in range(total) if i not in present]
    return lacking


def _fetch(wanted: ParquetSet, folder: Path) -> None:
    import huggingface_hub

    log.info("fetching %s from the hub into %s", wanted.repository, folder)
    # Complete files only are renamed into the folder; a download that fails leaves nothing behind. The temporary
    # folder lies beside the final one, on the same file system, so that the renames are atomic.
    new_folders = [parent for parent in (folder.parent, *folder.parent.parents) if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".fetch-{folder.name}-", dir=folder.parent) as temporary:
            pattern = f"{wanted.within}/*.parquet" if wanted.within else "*.parquet"
            # Repositories that hold a script instead of Parquet have the hub's conversion of it in a branch.
            for revision in (None, CONVERTED):
                huggingface_hub.snapshot_download(
                    str(wanted.repository), repo_type="dataset", allow_patterns=[pattern], local_dir=temporary,
                    revision=revision,
                )  # fmt: skip
                complete = [file for file in Path(temporary).rglob("*.parquet") if split_of(file) in wanted.splits]
                if complete:
                    break
            folder.mkdir(exist_ok=True)
            for file in complete:
                place = folder / split_of(file) / file.name if file.stem.isdigit() else folder / file.name
                place.parent.mkdir(exist_ok=True)
                os.replace(file, place)
    except BaseException:
        for parent in new_folders:
            with contextlib.suppress(OSError):
                parent.rmdir()  # only if empty
        raise

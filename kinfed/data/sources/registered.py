"""The registries of data sets and partitions: one line each, imported at first use, so that listing needs no torch; and
`load_source`, which loads a data set by its name, or a table of your own by its path.

    load_source("mnist", options={"examples": 1000})
    load_source("patients.csv", options={"label_column": "outcome", "client_column": "hospital"})
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfed.core import NoOptions, Registry, make_options
from kinfed.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from kinfed.data.partitions.base import Partition
    from kinfed.data.sources.source import Source

SOURCES: Registry[Callable[[Any, Path | None, int], Source]] = Registry("data set")
PARTITIONS: Registry[type[Partition]] = Registry("partition")


def names_clients(name: str) -> bool:
    """Whether a registered data set is shared out by its own clients unless another partition is named."""
    return name in SOURCES and bool(SOURCES[name].facts.get("names_clients", False))


def load_source(
    name: str, data_dir: Path | None = None, seed: int = 0, options: Mapping[str, Any] | None = None
) -> Source:
    """Load a registered data set, or a table if `name` is the path of one. `seed` is for generated data only."""
    if name in SOURCES:
        entry = SOURCES[name]
        settings = make_options(entry.options, options or {}, f"data set {name}")
        source = entry.target(settings, data_dir, seed)
        source.options = dataclasses.asdict(settings)
        return source
    from kinfed.data.sources import table, table_files  # with pyarrow
    from kinfed.data.sources.table_options import TableOptions

    if table_files.is_table(name):
        path, settings = Path(name), make_options(TableOptions, options or {}, f"table {name}")
        return table.source_from_table(
            table_files.read_table(path, settings.encoding), settings, str(path), path.parent
        )
    error = unknown_name("data set", name, SOURCES)
    raise ConfigError(f"{error}; or give the path of a {', '.join(table_files.SUFFIXES)} file")


# The function load_<name> of a file of kinfed.data.sources, its options, and a summary; see kinfed.data.sources.source.
_IMAGES = (
    ("digits", "image_sets:", "1,797 8x8 digits from scikit-learn; no download"),
    ("mnist", "image_sets:ImageOptions", "70,000 28x28 digits, 60,000 + 10,000"),
    ("fashion_mnist", "image_sets:ImageOptions", "70,000 28x28 pieces of clothing, 60,000 + 10,000"),
    ("cifar10", "image_sets:ColourOptions", "60,000 32x32 colour images, 10 classes, 50,000 + 10,000"),
    ("cifar100", "image_sets:ColourOptions", "60,000 32x32 colour images, 100 classes, 50,000 + 10,000"),
    ("cifar100_subset", "image_sets:ColourOptions", "2,400 images of 20 CIFAR-100 classes"),
    ("letters", "image_sets:LettersOptions", "16x8 handwritten lower-case letters, a stand-in for FEMNIST"),
    ("emnist_letters_subset", "image_sets:ImageOptions", "10,000 28x28 letters a-m, both cases"),
)
_SITES = "site_tables:SiteTableOptions"
_BY_CLIENT = (
    ("femnist", "image_sets:FemnistOptions", "28x28 handwritten characters by writer, 62 classes (LEAF)"),
    ("reviews", "text:ReviewOptions", "reviews of 16 domains, two sentiments, as tokens"),
    ("heart_disease", _SITES, "heart disease in four hospitals (UCI), many gaps"),
    ("parkinsons_telemonitoring", "site_tables:ParkinsonsOptions", "Parkinson scores of 42 patients from their voice"),
    ("london_schools", _SITES, "exam scores in 139 London schools"),
    ("wisdm_ar_v1", _SITES, "activities of 36 users from a phone's accelerometer"),
    ("exam65_london", _SITES, "normalized exam scores in 65 London schools"),
    ("chem97", _SITES, "A-level chemistry scores in 2,410 schools"),
    ("insteval", _SITES, "ratings of lecturers by 2,972 students"),
    ("contraception", _SITES, "use of contraception in 60 districts of Bangladesh"),
    ("beijing_air", _SITES, "PM2.5 at 12 stations from weather and time"),
    ("diabetes_130", _SITES, "readmission of diabetics within 30 days, by medical specialty"),
    ("adult", _SITES, "income above $50,000, by level of education"),
    ("tcga_brca", _SITES, "survival with breast cancer in six regions (TCGA, as in FLamby)"),
    ("rotterdam_gbsg", _SITES, "recurrence-free survival with breast cancer in two studies"),
    ("mdsd_amazon4", _SITES, "8,000 reviews of four kinds of products, liked or not, as texts of a table"),
    ("breast_cancer", _SITES, "569 tumours (scikit-learn), five made-up sites; no download"),
    ("post_offices", _SITES, "1,797 digits (scikit-learn) at eight made-up post offices; no download"),
    ("sentiment140", "text:TweetOptions", "tweets by user, two sentiments, GloVe word vectors"),
    ("pfllib", "pfllib_folder:PfllibOptions", "a folder that PFLlib's generators wrote, with its clients and split"),
    ("sentiment140_subset", "text:TweetSubsetOptions", "39,415 tweets, for trying the text task only"),
)
for _facts, _rows in (({}, _IMAGES), ({"names_clients": True}, _BY_CLIENT)):
    for _name, _place, _summary in _rows:
        _file, _, _options = f"kinfed.data.sources.{_place}".partition(":")
        _kind = f"{_file}:{_options}" if _options else NoOptions
        SOURCES.register(_name, f"{_file}:load_{_name}", summary=_summary, options=_kind, **_facts)

# A class of a file of kinfed.data.partitions, and a summary; see kinfed.data.partitions.base.
for _name, _location, _summary in (
    ("classes", "label_skew:Classes", "k neighbouring classes per client, sizes uniform (CGPFL, pFedMe)"),
    ("pathological", "label_skew:Pathological", "two single-class shards per client (McMahan et al., FedFomo)"),
    ("dirichlet", "label_skew:Dirichlet", "class proportions from Dirichlet(alpha)"),
    ("pfllib_dirichlet", "pfllib_laws:ClosingDirichlet",
     "Dirichlet(alpha) as in PFLlib and FL-bench: a client with its share of the examples gets no more"),
    ("pfllib_pat", "pfllib_laws:ClassBlocks", "k classes per client in blocks of uneven size, as in PFLlib (pat)"),
    ("feature_shift", "shifts:FeatureShift", "dirichlet, with a contrast and brightness for every client"),
    ("hidden_groups", "shifts:HiddenGroups", "iid, in hidden groups with rotated images or renamed classes (IFCA)"),
    ("powerlaw", "label_skew:Powerlaw", "k neighbouring classes, lognormal sizes over the whole data (FedProx MNIST)"),
    ("pfedme_split", "label_skew:FirstComeFirstServed",
     "3 neighbouring classes, first come first served (pFedMe generator, Self-FL CIFAR-10)"),
    ("lognormal", "label_skew:Lognormal", "k neighbouring classes in equal shares, lognormal sizes (FedProx FEMNIST)"),
    ("iid", "base:Iid", "equal random parts: every client sees the same distribution"),
    ("column", "base:NaturalClients", "the clients that the data set itself names"),
    ("latent", "latent:Latent",
     "groups of clients share clusters of similar examples (FedFomo's latent distributions)"),
    ("file", "partition_file:PartitionFile", "the clients of a partition file: who holds which rows, shared by name"),
):  # fmt: skip
    _facts = {"names_clients": True} if _name in ("column", "file") else {}
    PARTITIONS.register(_name, f"kinfed.data.partitions.{_location}", summary=_summary, **_facts)

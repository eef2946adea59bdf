"""The registries of data sets and partitions: one line each. What a line names is imported when it is first used, so
that listing names needs no torch.

    _add_source(name, "module:function", summary, "Options")      what the function is: kinfed.data.sources.source
    _add_partition(name, "module:Class", summary)                 what the class is: kinfed.data.partitions.base
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfed.core import NoOptions, Registry

if TYPE_CHECKING:
    from kinfed.data.partitions.base import Partition
    from kinfed.data.sources.source import Source

SOURCES: Registry[Callable[[Any, Path | None, int], Source]] = Registry("data set")
PARTITIONS: Registry[type[Partition]] = Registry("partition")


def _add_source(name: str, location: str, summary: str, options: str = "", **about: Any) -> None:
    module = f"kinfed.data.sources.{location.partition(':')[0]}"
    where = f"{module}:{options}" if options else NoOptions
    SOURCES.register(name, f"kinfed.data.sources.{location}", summary=summary, options=where, **about)


def _add_partition(name: str, location: str, summary: str) -> None:
    PARTITIONS.register(name, f"kinfed.data.partitions.{location}", summary=summary)


def names_clients(name: str) -> bool:
    """Whether a registered data set is shared out by its own clients unless another partition is named."""
    return name in SOURCES and bool(SOURCES[name].facts.get("names_clients", False))


_add_source("digits", "image_sets:load_digits", "1,797 8x8 digits from scikit-learn; no download")
_add_source("mnist", "image_sets:load_mnist", "70,000 28x28 digits, 60,000 + 10,000", "ImageOptions")
_add_source(
    "fashion_mnist",
    "image_sets:load_fashion_mnist",
    "70,000 28x28 pieces of clothing, 60,000 + 10,000",
    "ImageOptions",
)
_add_source(
    "cifar10",
    "image_sets:load_cifar10",
    "60,000 32x32 colour images, 10 classes, 50,000 + 10,000",
    "ColourOptions",
)
_add_source(
    "cifar100",
    "image_sets:load_cifar100",
    "60,000 32x32 colour images, 100 classes, 50,000 + 10,000",
    "ColourOptions",
)
_add_source(
    "cifar100_subset", "image_sets:load_cifar100_subset", "2,400 images of 20 CIFAR-100 classes", "ColourOptions"
)
_add_source(
    "letters",
    "image_sets:load_letters",
    "16x8 handwritten lower-case letters, a stand-in for FEMNIST",
    "LettersOptions",
)
_add_source(
    "emnist_letters_subset",
    "image_sets:load_emnist_letters_subset",
    "10,000 28x28 letters a-m, both cases",
    "ImageOptions",
)
_add_source(
    "femnist",
    "femnist:load_femnist",
    "28x28 handwritten characters by writer, 62 classes (LEAF)",
    "FemnistOptions",
    names_clients=True,
)
_add_source(
    "reviews",
    "reviews:load_reviews",
    "reviews of 16 domains, two sentiments, as tokens",
    "ReviewOptions",
    names_clients=True,
)
_add_source(
    "heart_disease",
    "site_tables:load_heart_disease",
    "heart disease in four hospitals (UCI), many gaps",
    "SiteTableOptions",
    names_clients=True,
)
_add_source(
    "parkinsons_telemonitoring",
    "site_tables:load_parkinsons_telemonitoring",
    "Parkinson scores of 42 patients from their voice",
    "ParkinsonsOptions",
    names_clients=True,
)
_add_source(
    "london_schools",
    "site_tables:load_london_schools",
    "exam scores in 139 London schools",
    "SiteTableOptions",
    names_clients=True,
)
_add_source(
    "wisdm_ar_v1",
    "site_tables:load_wisdm_ar_v1",
    "activities of 36 users from a phone's accelerometer",
    "SiteTableOptions",
    names_clients=True,
)
_add_source(
    "exam65_london",
    "site_tables:load_exam65_london",
    "normalized exam scores in 65 London schools",
    "SiteTableOptions",
    names_clients=True,
)
_add_source(
    "chem97",
    "site_tables:load_chem97",
    "A-level chemistry scores in 2,410 schools",
    "SiteTableOptions",
    names_clients=True,
)
_add_source(
    "insteval",
    "site_tables:load_insteval",
    "ratings of lecturers by 2,972 students",
    "SiteTableOptions",
    names_clients=True,
)
_add_source(
    "contraception",
    "site_tables:load_contraception",
    "use of contraception in 60 districts of Bangladesh",
    "SiteTableOptions",
    names_clients=True,
)
_add_source(
    "beijing_air",
    "site_tables:load_beijing_air",
    "PM2.5 at 12 stations from weather and time",
    "SiteTableOptions",
    names_clients=True,
)
_add_source(
    "diabetes_130",
    "site_tables:load_diabetes_130",
    "readmission of diabetics within 30 days, by medical specialty",
    "SiteTableOptions",
    names_clients=True,
)
_add_source(
    "adult",
    "site_tables:load_adult",
    "income above $50,000, by level of education",
    "SiteTableOptions",
    names_clients=True,
)
_add_source(
    "breast_cancer",
    "site_tables:load_breast_cancer",
    "569 tumours (scikit-learn), five made-up sites; no download",
    "SiteTableOptions",
    names_clients=True,
)
_add_source(
    "sentiment140",
    "text:load_sentiment140",
    "tweets by user, two sentiments, GloVe word vectors",
    "TweetOptions",
    names_clients=True,
)
_add_source(
    "sentiment140_subset",
    "text:load_sentiment140_subset",
    "39,415 tweets, for trying the text task only",
    "TweetSubsetOptions",
    names_clients=True,
)

_add_partition("classes", "classes:Classes", "k neighbouring classes per client, sizes uniform (CGPFL, pFedMe)")
_add_partition("pathological", "classes:Pathological", "two single-class shards per client (McMahan et al., FedFomo)")
_add_partition("dirichlet", "dirichlet:Dirichlet", "class proportions from Dirichlet(alpha)")
_add_partition(
    "feature_shift", "feature_shift:FeatureShift", "dirichlet, with a contrast and brightness for every client"
)
_add_partition(
    "hidden_groups", "hidden_groups:HiddenGroups", "iid, in hidden groups with rotated images or renamed classes (IFCA)"
)
_add_partition(
    "powerlaw", "generators:Powerlaw", "k neighbouring classes, lognormal sizes over the whole data (FedProx MNIST)"
)
_add_partition(
    "pfedme_split",
    "generators:FirstComeFirstServed",
    "3 neighbouring classes, first come first served (pFedMe generator, Self-FL CIFAR-10)",
)
_add_partition(
    "lognormal", "generators:Lognormal", "k neighbouring classes in equal shares, lognormal sizes (FedProx FEMNIST)"
)
_add_partition("iid", "iid:Iid", "equal random parts: every client sees the same distribution")
_add_partition("column", "iid:NaturalClients", "the clients that the data set itself names")
_add_partition(
    "latent", "latent:Latent", "groups of clients share clusters of similar examples (FedFomo's latent distributions)"
)

"""Requirements of kinfed and its extras, and which are installed here."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

# What each extra is for; pyproject.toml says what it holds.
EXTRAS = {
    "fast": "compiled loops (backend fused)",
    "dp": "epsilon of differential privacy",
    "tune": "kinfed tune",
    "ray": "rounds on several machines (--pool ray)",
    "flower": "real clients (kinfed deploy)",
    "text": "tokenizers of pretrained encoders",
    "audio": "recordings (data set wakeword)",
    "onnx": "models as ONNX (kinfed export --onnx)",
    "huggingface": "federations from Hugging Face datasets",
    "tensorboard": "curves in TensorBoard (--track tensorboard)",
    "mlflow": "runs in MLflow (--track mlflow)",
    "wandb": "runs in Weights & Biases (--track wandb)",
}
BASE = ""


@dataclass(frozen=True)
class Package:
    """A requirement of kinfed as it is met here."""

    name: str
    wanted: str  # "<3,>=2.6"; "" is any version
    version: str | None  # None: not installed
    fits: bool  # installed, in a version that is admitted

    def __str__(self) -> str:
        if self.version is None:
            return f"{self.name}{self.wanted} is not installed"
        return f"{self.name} {self.version}" + ("" if self.fits else f" does not fit {self.wanted}")


def requirements(texts: list[str] | None = None) -> dict[str, list[Package]]:
    """Requirements of the base install (BASE) and of each extra, as met here; `texts`: those of another package."""
    packages: dict[str, list[Package]] = {extra: [] for extra in (BASE, *EXTRAS)}
    for text in metadata.requires("kinfed") or [] if texts is None else texts:
        requirement = Requirement(text)
        for extra, parts in packages.items():
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                parts.append(_package(requirement))
                break  # what the base needs is not told again for every extra
    return packages


def _package(requirement: Requirement) -> Package:
    wanted = str(requirement.specifier)
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Package(requirement.name, wanted, None, False)
    return Package(requirement.name, wanted, version, requirement.specifier.contains(version, prereleases=True))

"""Several labels of a row.

Which of five drugs does a patient with diabetes get? Any of them, or none: each row has five labels. Clients are
medical specialties, which prescribe by habits of their own. The label columns are named, the rest follows: loss,
metrics and a probability of each label. Needs the data set `diabetes_130` in the folder that KINFED_DATA names.
"""

import os
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import kinfed

DRUGS = ["insulin", "metformin", "glipizide", "glyburide", "pioglitazone"]
KNOWN = [
    "age", "gender", "race", "time_in_hospital", "num_lab_procedures", "num_medications", "number_inpatient",
    "number_diagnoses", "A1Cresult", "max_glu_serum",
]  # fmt: skip


def read_visits(specialties: int, most: int) -> pd.DataFrame:
    """One visit of every patient, at most so many of a specialty."""
    file = Path(os.environ["KINFED_DATA"]) / "diabetes_130" / "train-00000-of-00001.parquet"
    table = pd.read_parquet(file).drop_duplicates("patient_nbr")
    table = table[table["client"] != "unknown"]
    table = table[table["client"].isin(table["client"].value_counts().index[:specialties])]
    table = table.groupby("client").sample(frac=1, random_state=0).groupby("client").head(most)
    drugs = (table[DRUGS] != "No").astype(int)
    return pd.concat([table[["client", *KNOWN]], drugs], axis=1)


def main(picture: str = "several_labels.svg", rounds: int = 15, specialties: int = 12, most: int = 400) -> None:
    visits = read_visits(specialties, most)
    federation = kinfed.Federation.from_table(visits, client_column="client", label_column=",".join(DRUGS))
    print(federation)
    result = kinfed.run(
        federation=federation, model="mlp", algorithms="local,fedavg,ditto,fedrep", rounds=rounds, seeds=(0, 1),
        participation=1.0, steps=10, batch=16, metric="label_accuracy",
    )  # fmt: skip
    table = result.to_frame().groupby("algorithm", sort=False)[["personal_label_accuracy", "personal_loss"]].mean()
    print(table.round(4))

    rows = result.clients().groupby(["client", "algorithm"])["personal_loss"].mean().unstack()[list(table.index)]
    figure, axes = plt.subplots(figsize=(6, 4))
    gain = rows["local"].to_numpy()[:, None] - rows.drop(columns="local")
    axes.boxplot(gain, tick_labels=list(gain.columns), showmeans=True)
    axes.axhline(0, color="#57606a", lw=1)
    axes.set(ylabel="loss below that of learning alone, by specialty")
    figure.savefig(picture)


if __name__ == "__main__":
    main()

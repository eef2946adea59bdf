"""A class for every pixel.

Where is the ink? Clients have a few noisy images of digits each, through scanners of their own: faint or strong, dark
or bright. A small convolutional network answers with the logits of every pixel (a dense problem). One model for all is
misled by brightness; FedBN keeps normalization layers at the clients and shares the convolutions.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import kinfed

CLIENTS = 8


def scans(per_client: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images [N, 1, 8, 8] as scanned, which of their pixels are ink [N, 8, 8], and the client of each."""
    draw = np.random.default_rng(0)
    images = load_digits().images[: CLIENTS * per_client].astype("float32") / 16
    client = np.arange(len(images)) % CLIENTS
    contrast, brightness = np.linspace(0.5, 1.5, CLIENTS)[client], np.linspace(-1, 1, CLIENTS)[client * 3 % CLIENTS]
    noise = 0.3 * draw.normal(size=images.shape)
    seen = contrast[:, None, None] * (images + noise) + brightness[:, None, None]
    return seen[:, None].astype("float32"), (images > 0.4).astype("int64"), client


def network() -> nn.Module:
    layers = [nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()]
    layers += [nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(12, 2, 1))


def main(picture: str = "classes_of_pixels.svg", rounds: int = 30, per_client: int = 16) -> None:
    x, y, client = scans(per_client)
    federation = kinfed.Federation.from_arrays(x, y, client, task="dense", test_fraction=0.5, name="scans")
    result = kinfed.run(
        federation=federation, model=network, algorithms="local,fedavg,fedbn", rounds=rounds, seeds=(0,), steps=5,
        participation=1.0, lr=0.1,
    )  # fmt: skip
    table = result.to_frame().set_index("algorithm")["personal_position_accuracy"]
    print((100 * table).round(1))

    shown = [0, 1, 6]  # one client after the other
    figure, axes = plt.subplots(len(shown), 2 + len(table), figsize=(7, 4))
    for line, number in zip(axes, shown, strict=True):
        pictures = {"scan": x[number, 0], "ink": y[number]}
        for name in table.index:
            logits = result.personal_model(int(client[number]), name).module(torch.from_numpy(x[number : number + 1]))
            pictures[f"{name} {100 * table[name]:.1f} %"] = logits[0].argmax(0).numpy()
        for place, (title, image) in zip(line, pictures.items(), strict=True):
            place.imshow(image, cmap="Greys")
            place.set_title(title if number == shown[0] else "", fontsize=9)
            place.set_axis_off()
    figure.savefig(picture)


if __name__ == "__main__":
    main()

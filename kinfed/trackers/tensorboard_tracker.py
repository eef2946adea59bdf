"""Event files for TensorBoard: <run folder>/tensorboard/<method>-<seed>, or below a folder of one's choice.

tensorboard --logdir runs/a/tensorboard
"""

import json

from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: F401  (torch's writer says less about its absence)
from torch.utils.tensorboard import SummaryWriter

from kinfed.runs import RunInfo
from kinfed.trackers.track import Tracker, Values


class TensorBoardTracker(Tracker[SummaryWriter]):
    def open(self, run: RunInfo, label: str, seed: int, first: int) -> SummaryWriter:
        warm_start = 0 if label not in run.settings["algorithms"] else int(run.settings["warm_start"])
        # Rounds after the last checkpoint of a killed run come again; their earlier events are dropped by the reader.
        purged = warm_start + first + 1 if first else None
        writer = SummaryWriter(str(self.folder(run, "tensorboard") / self.track_name(label, seed)), purge_step=purged)
        if not first:
            writer.add_text("settings", f"```\n{json.dumps(run.settings, indent=1, default=str)}\n```")
        return writer

    def write(self, track: SummaryWriter, values: Values, round: int) -> None:
        for name, value in values.items():
            track.add_scalar(name, value, round)

    def close(self, track: SummaryWriter, finished: bool) -> None:
        track.close()

"""Import this before a package that imports torchvision for data sets that are not used here.

Beside a CPU build of torch, torchvision's wheel has no operators of its own, and is imported only where the two that
it describes in any case exist by name.
"""

from __future__ import annotations

import importlib.util

import torch

if importlib.util.find_spec("torchvision") and not hasattr(torch.ops.torchvision, "nms"):
    LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

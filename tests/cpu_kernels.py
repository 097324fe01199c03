"""Properties of this machine's processor on which test results depend."""

from __future__ import annotations

import torch

# DeepSpeed performs the same check before it keeps parameters in fp16, so ZeRO refuses 16-mixed on most processors.
FP16: bool = torch.ops.mkldnn._is_mkldnn_fp16_supported()

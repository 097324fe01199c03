"""The strategies that must give the reference's numbers. A new one joins by a line here."""

from __future__ import annotations

from dataclasses import dataclass, field

from drivetrain import Strategy
from drivetrain_strategies import FSDPStrategy


@dataclass(frozen=True)
class Candidate:
    """A strategy as the suite runs it.

    Attributes:
        name: as `Fit(strategy=...)` takes it, save where layers are split.
        ranks: on how many ranks it runs every case.
        also_on: on how many more it runs the cases where that matters.
        refuses: cases that it cannot train, with a part of the message that says so before or on the first step.
        only: the cases it is for; empty for all.
        shards: a rank holds parts of gradients, so that norms are summed up part by part.
        tensor: over how many ranks the networks' layers are split, by hand; these ranks read the same data.
    """

    name: str
    ranks: int
    also_on: tuple[int, ...] = ()
    refuses: dict[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    shards: bool = False
    tensor: int = 1

    def strategy(self) -> str | Strategy:
        """What `Fit` is given."""
        return self.name if self.tensor == 1 else FSDPStrategy(tensor_parallel=self.tensor)


NO_SPARSE = {"sparse embedding": "an EmbeddingBag with sparse=True"}

STRATEGIES = [
    Candidate("single_device", ranks=1),
    Candidate(
        "ddp",
        ranks=2,
        also_on=(4,),
        # C-01: by name, and on the first step.
        refuses={"orphan parameter": "got no gradient: 'net.spare.weight', 'net.spare.bias'"},
    ),
    Candidate(
        "ddp_static_graph",
        ranks=2,
        also_on=(4,),
        refuses={"GAN": "static_graph=True together with manual optimization"},
    ),
    # Its difference from "ddp" is in which parameters it waits for.
    Candidate(
        "ddp_find_unused_parameters_true",
        ranks=2,
        only=("plain", "accumulated", "orphan parameter", "uneven data, joiners"),
    ),
    Candidate("fsdp", ranks=2, also_on=(4,), refuses=NO_SPARSE, shards=True),
    Candidate("fsdp_grad_op", ranks=2, refuses=NO_SPARSE, shards=True),
    Candidate("hsdp", ranks=4, refuses=NO_SPARSE, shards=True),
    Candidate("fsdp x tp", ranks=4, refuses=NO_SPARSE, shards=True, tensor=2),
]

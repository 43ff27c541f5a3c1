"""Books and GPUs that outlive one daemon and are there for the next, in one process."""

from __future__ import annotations

import contextlib

from backend.core.protocols import Gpu, Inherited
from backend.core.reasons import FROZEN, ON
from backend.core.records import Wanted
from backend.ledgers.account import Account
from backend.ledgers.soft import SoftLedger
from backend.process.identity import ROOT, Process, SliceOn
from tests.support.harness import Harness, StubGpu, World, running


class SurvivingLedger(SoftLedger):
    """Books that the next daemon finds again, as it finds those of the kernel."""

    def __init__(self, *gpus: StubGpu) -> None:
        super().__init__()
        self.hardware = {gpu.info.index: gpu for gpu in gpus}
        """GPU by index, whose levers hold what was acknowledged."""
        self.doubtful: set[Process] = set()
        """Processes whose levers were told to move and did not answer."""

    def add_gpu(self, index: int, capacity: int, granule: int = 1) -> None:
        account = self._accounts.get(SliceOn(ROOT, index))
        if account is None:
            super().add_gpu(index, capacity, granule)
        else:
            self._listeners.clear()
            account.update(high=capacity)

    def inherited(self) -> list[Inherited]:
        found: list[Inherited] = []

        def below(account: Account) -> None:
            for group, child in account.children.items():
                process, gpu = group.node, self.hardware[group.gpu]
                applied = Wanted()
                if isinstance(process, Process):
                    applied = Wanted(FROZEN if process in gpu.detached else ON, gpu.timeslices.get(process, 0))
                found.append(Inherited(group, account.group, applied, process in self.doubtful))
                below(child)

        for group, account in self._accounts.items():
            if group.node == ROOT:
                below(account)
        return found


class Machine:
    """Everything that outlives a daemon: the books, the hardware, and the running programs."""

    def __init__(self, *gpus: StubGpu) -> None:
        self.gpus = gpus
        self.ledger = SurvivingLedger(*gpus)
        self.world = World()

    def daemon(self, *gpus: Gpu, scheduler: bool = False) -> contextlib.AbstractAsyncContextManager[Harness]:
        """Start the next daemon, on the same GPUs or on these."""
        return running(*(gpus or self.gpus), ledger=self.ledger, world=self.world, scheduler=scheduler)

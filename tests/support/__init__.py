"""Helpers of the tests: a test imports from here, and no test imports another.

The program around a test:
    harness.py         the whole program in one process and in virtual time (level 3)
        levers.py          what can be asked of a process, for tests of every lever
    cuda_session.py    the program, and CUDA programs at its socket
    turns.py           CUDA programs whose library has a gate of turns
    prepared.py        one of them, whose library tells a working set
    loopers.py         programs of a software GPU that use all of their pages in each step
    restarted.py       books and GPUs that outlive a daemon, in one process
    killed.py          driver, journal and programs that outlive a daemon
    killed_life.py     a daemon's life up to a point, and what the next one finds
    mounted.py         a real mount with a daemon of its own, and tenants on it (level 4)
    command.py         the command, run to its end
    tenant_socket.py   a connection to the software GPU's socket
    cgroups.py         real cgroups to put real processes into
    proc.py            what /proc tells of a process
    terminal.py        a program on a pseudo-terminal, and what the terminal shows
    stopwatch.py       processor time of an act, whatever else runs
    policy_program.py  `ggroupfs policy` in a process of its own

Doubles:
    fake_nvidia.py     a driver and an NVML in memory, at the seam of the system calls
    nvidia_rig.py      GPUs of the NVIDIA package on that driver
    faults.py          a driver or an NVML that fails on a plan
    fake_systemd.py    a bus with a systemd on it
    units.py           a manager of units in the process of the test
        lanes.py           levers of the policy `lanes` that only record calls
    scheduled.py       a GPU shared by the scheduler, in simulated time
    balanced.py        GPUs among which `balance` moves programs, in simulated time
    served.py          a GPU on which `slo` keeps latencies, in simulated time
    fake_bench.py      a GPU and systems that share it, for the scenarios of tests/bench/gpu
    measured.py        made-up measurements

Oracles and generators:
    model.py           the books kept the naive way
    ledger_machine.py  histories of a ledger's calls, compared with the model
    journaled.py       histories of a journal's lines
    strategies.py      the parts of generated histories
    fuzzed.py          fuzzers and their corpora
    page.py            pages of docs/
    semantics.py       docs/semantics.md, executed
    rights.py          docs/rights.md, and the users and namespaces that it is about
    spoken.py          what the command line knows, asked of the code

Programs that tests start:
    bench_program.py   in place of the CUDA programs of tests/bench
    fuse_tenant.py     a tenant with a file system of its own
    lanes_job.py       a job of the policy `lanes`
    rights_actor.py    tries every operation as the user that runs it
"""

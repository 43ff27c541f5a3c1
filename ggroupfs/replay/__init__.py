"""The replay simulator: runs a policy over the runlist of the software GPU, with jobs from a trace, in virtual time."""

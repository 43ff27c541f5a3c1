"""Doubles of what a DRA driver meets: API server, scheduler, kubelet and container runtime, as those of Kubernetes 1.36
do."""

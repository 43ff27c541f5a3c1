"""Doubles of a DRA driver's partners: API server, scheduler, kubelet and container runtime, as in Kubernetes 1.36."""

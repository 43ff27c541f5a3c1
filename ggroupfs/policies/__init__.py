"""Policies over a tree: deciding which of several jobs runs, and the interface between a policy and its platform."""

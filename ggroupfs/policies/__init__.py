"""Policies over a tree: what decides who of several jobs runs, and the face between that and where it runs."""

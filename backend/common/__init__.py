"""Basics for every part of the backend: errors, threads, turns, and tasks that last."""

"""Busy periods in virtual time: the library's own rules, and a model of an engine with programs that follow them."""

"""Busy periods in virtual time: the library's own rules, and an engine on which programs go by them."""

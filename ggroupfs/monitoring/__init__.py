"""Monitoring: the dashboard over the metrics of `ggroupfs metrics`, as panels and in Grafana's format."""

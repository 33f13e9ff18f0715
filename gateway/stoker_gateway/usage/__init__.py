"""Completed requests and their token usage: metrics and billing."""

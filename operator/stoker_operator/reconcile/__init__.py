"""One endpoint's loop: evaluate the spec, decide, apply, report the status."""

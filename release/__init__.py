"""Building a release: `make release` (docs/design/releases.md)."""

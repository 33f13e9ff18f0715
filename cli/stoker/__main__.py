"""``python -m stoker``."""

from stoker.main import main

if __name__ == "__main__":
    raise SystemExit(main())

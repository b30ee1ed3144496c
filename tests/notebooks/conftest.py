# The canaries must fail: test_canaries.py runs them one by one, a plain `pytest --nbmake` must not.
collect_ignore_glob = ["canaries/*.ipynb"]

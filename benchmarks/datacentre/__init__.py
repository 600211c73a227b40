"""Emulated data centre: hosts with links of a chosen rate on one machine, and the ranks that run in them.

    network.py   hosts as network namespaces, a switch (or one a rack), rate limits; counts the bytes of every link
    links.py     measures what a link really carries, before anything is timed on it
    jobs.py      starts ranks inside the hosts, commands them, collects their answers, reports the one that fails
    serve.py     the rank's side of it

Nothing outside of these namespaces is touched, and nothing is left behind (`network.py` says how).
"""

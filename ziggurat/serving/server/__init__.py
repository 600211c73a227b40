"""The server: requests over HTTP, answers of an exported folder. Starlette on uvicorn, computing in batches.

    supervisor ──fork──► worker ──► connections (uvicorn)  receive timeouts, draining
      restarts,            │          └► app (Starlette)    routes, limits, errors in four parts as JSON
      swaps,               │               └► engine        bounded queue, deadlines, batches, shedding, ladder
      spares               │                    └► Answerer (the export; one thread computes, torch lets go of the GIL)
                           └► control  a line of JSON each way: ready, serve, drain, swap, heartbeat

What overload does, in this order: batches grow; answers are made with less effort and say so (`degraded`); requests
whose wait would exceed their deadline are refused at once with 503 and Retry-After, so that those that are taken in are
answered in time. Nothing waits in a place without a bound.

    config.py       every limit and timeout, with its default
    queue/          the queue and the thread that computes (`engine.py`), what a batch costs, how much effort it gets
    reading.py      bodies and headers within bounds; responses.py answers as JSON
    app.py          the routes; pages.py the web page's own; openapi.py the description
    metrics.py      /metrics, of one process or summed over all workers
    tracing.py      requests as traces of OpenTelemetry, if asked for
    connections.py  what uvicorn lacks: time to receive, time to send, size of headers, a drain that drops nothing
    processes/      the process that holds the port (`supervisor.py`), those that answer (`worker.py`), their messages
    changed_items/  items that change while a server runs, and the files that keep their changes
    serve.py        all of it for `ziggurat serve`
    shards/         an index divided among processes, and the server in front of them

Needs the extra `serve` (starlette, uvicorn, httptools, prometheus-client); nothing outside of this folder imports them.
"""

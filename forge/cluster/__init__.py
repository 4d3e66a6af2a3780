"""Many engines: replicas on Ray Serve, routers that choose among them, and KV hand-overs between them.

`routers`, `fleet` and `events` are plain Python and know nothing of Ray; `simulation` runs them without engines.
`deployment` is what runs in a replica and `client` what the HTTP server has in place of an engine.

Many engines run in three ways because each shows what the others cannot: `local` counts tokens exactly on real engines
in one process, `simulation` tells the time of more engines than there are cores, Ray runs and restarts processes.
"""

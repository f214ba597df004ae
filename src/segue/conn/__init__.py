"""Floor 3: what an engine embeds to hand KV over.

`segue.conn.manager` has `KVManager` and `KVConfig`, `segue.conn.handles` has `KVSender` and
`KVReceiver`. This package itself imports nothing, so that pure rooms can use the handles' types.
"""

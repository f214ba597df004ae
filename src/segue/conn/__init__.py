"""Floor 3: what an engine embeds: KVManager, KVSender, KVReceiver."""

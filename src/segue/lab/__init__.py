"""Tools that serving does not need: simulator, measurements, advice."""

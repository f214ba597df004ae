"""The fixtures of `frontend_rig`, and the names that the programs of `../shared/cases` look for here.

Its helpers have a module whose name no other folder has."""

from __future__ import annotations

from frontend_rig import CHATML, FakeBackend, backend, door, make_tokenizer, model_folder, serve, tokenizer

__all__ = ["CHATML", "FakeBackend", "backend", "door", "make_tokenizer", "model_folder", "serve", "tokenizer"]

"""Account of the time of a run over all its starts: ``ledger.jsonl``, written by trainer and supervisor."""

"""How many prefill and decode workers a workload needs: a calculation, without I/O.

`costs` says how long one forward takes, `workload` what is asked for, `queues` what then happens at so many
workers, `advice` which number of them to run. docs/advise.md has the calculation in words.
"""

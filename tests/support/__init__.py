"""What tests share: ranks, hosts, waits, members of one process, models. What one file needs stands in that file.

* Ranks are processes: `ranks.RankPool` (the fixture `ranks`) runs one function after another on lasting ranks,
  `on_ranks` decorates a test that does only that,
  `ranks.spawn_ranks` starts ranks that may be killed; `rank_worker` is what functions use inside. `leaks` finds what
  failed ranks have left behind (the fixture `nothing_left`).
* Hosts are network namespaces: `hosts.Hosts` makes them and limits or cuts their network; `host_ranks` has the same two
  ways to start ranks on them (the fixture `host_ranks`).
* Waits: `waiting.until` for a condition of this process, `RankProcesses.until` for one of what ranks send.
* Members of one process: `members.HeapGroup` has heaps, endpoints and services of a group, driven by hand; on it stand
  `spread` (two hosts and an engine that copies), `linked` (links between them), `machines` (the state machine of
  `odc.fsdp`) and `handover_jobs` (jobs to read weights from). `sides` has roots with daemons up to the point where they
  are announced. `deferred` makes a device that works late.
* Implementations by contract: `conformance` and `heaps`; `engines`; `listeners`; `atomics`.
* Faults: `faults` describes one and has the program that it befalls, `failing` judges how the other ranks end.
* The protocol: `explorer` searches, `protocol_model` and `lanes_model` are searched, `protocol_pages` writes the pages.
* Models and training: `models`, `programs` and `compare` (equality with FSDP2), `exact` (without rounding),
  `collectives` (none may be called); for rooms: `toy` and `doubles` (dispatch), `split_jobs` and `mixing_models`
  (split), `small_model`, `tiny_job`, `tiny_lm`, `tiny_multimodal`, `word_model` (experiments, evaluation), `trainers`,
  `verl` and `verl_engine` (integrations), `highs` (optima by an integer program), `together` (evaluation).
* Kernels: `kernel_heaps` and `kernel_references`, interpreted with `promises`; `compiled`, `compile_kernels` and
  `launched` for a target without a device; `device` and `look_kernel` with one.
* pytest itself: `extent` (the quick half and the rest), `skips` (what may skip in CI).
"""

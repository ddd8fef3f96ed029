import sys, tempfile, time
from pathlib import Path
from tests.faults.test_lack_of_memory import *
from fastdiff.data.encoding.builtin import encode_digits
import logging
if __name__ == "__main__":
    tmp = Path(tempfile.mkdtemp(dir="/tmp"))
    encode_digits(tmp/"digits", samples_per_shard=200)
    which = [int(x) for x in sys.argv[1:]]
    for i in which:
        t = FEW[i]; 
        began = time.time()
        ended = forked_ranks(run_trials, tmp/"digits", tmp/f"{i}", [t], ranks=t.ranks, timeout_s=50)
        for rank, e in enumerate(ended):
            if e.trace and "Connection" not in e.trace: print(rank, e.trace[-3000:])
        if all(e.trace is None for e in ended):
            f, p = tmp/f"{i}"/f"{t.ranks}-0", tmp/f"{i}"/t.plain
            print(i, t, max(abs(a-b)/b for a,b in zip(losses(f), losses(p))), micro_of(f), {k: distance(newest(f).full(k), newest(p).full(k)) for k in kinds(p)})
        print(time.time()-began, flush=True)

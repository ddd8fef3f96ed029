import time,sys,os
t0=time.time()
import tests.test_importance_resume as m
import tests.processes as p
orig=m.start
def start(c):
    print("start",time.time()-t0,flush=True); print(c, {k:v for k,v in os.environ.items() if 'TORCH' in k or 'TRIT' in k or 'OMP' in k})
    pr=orig([c[0],"-X","faulthandler",*c[1:]]); return pr
m.start=start
ow=m.wait_for_step
def w(*a):
    for _ in range(2000):
        try: ow(*a,timeout_s=5); break
        except AssertionError as e: print(e,time.time()-t0,os.getloadavg(),flush=True)
    print("waited",time.time()-t0,flush=True)
m.wait_for_step=w
ot=m.train_losses
def tl(*a):
    print("train",time.time()-t0,flush=True); r=ot(*a); print("trained",time.time()-t0,flush=True); return r
m.train_losses=tl
from tests.test_importance_resume import test_a_killed_run_goes_on_with_its_losses, one_thread

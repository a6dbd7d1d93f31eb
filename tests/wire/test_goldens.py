"""Every capture through codec and normalizer, no sockets: the output is exactly the engine's truth, and well-formed."""
import pytest

from kvbus.core.codec import Batch, decode_batch, encode_batch
from kvbus.core.normalize import Normalizer, Rules
from kvbus.core.schema import AllBlocksCleared
from kvbus.core.stats import SourceStats
from tests.wire.captures import CAPTURES, PlainSetRouter, lives, matches_truth

def run(name, **rules):
    stats=SourceStats(); n=Normalizer(Rules(**rules), stats); r=PlainSetRouter(); seq=0
    for k,life in enumerate(lives(name)):
        if k:
            n.reset(); r.apply(seq, encode_batch([AllBlocksCleared()],0.0,0)); seq+=1
        for m in life:
            b=decode_batch(m.payload)
            assert isinstance(b,Batch)
            out=n.apply(b, first_of_life=m.seq==0)
            if out:
                r.apply(seq, encode_batch(out,b.ts,b.rank)); seq+=1
    return n,stats,r

@pytest.mark.parametrize("name", CAPTURES)
def test_x(name):
    n,s,r=run(name)
    print(name, matches_truth(name,r), len(r.violations), r.violations[:3], 'orph',r.orphans,'clears',r.clears, dict(s.rejected), dict(s.filtered),s.rebuilds)
    again=PlainSetRouter()
    again.apply(0, encode_batch(list(n.announce()),0.0,0))
    print('   announce', again.blocks==r.blocks, again.violations[:3], again.orphans)

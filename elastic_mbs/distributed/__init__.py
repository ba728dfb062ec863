"""Many processes (DDP, FSDP2): the other ranks of a job, as a call meets them.

Every rank runs its pieces as if there were no other, so it may fail and replay as often as it
likes. Ranks meet once a call, when each has its own part of the gradient whole:

    begin    gradients that were there are put aside: `.grad` is this call's alone. Parameters that
             are sharded are gathered
    pieces   no collective: DDP's wrapper, and the hooks of fully_shard, are quiet
    meet     one exchange on the host: counts, who has failed, which leaves have gradients
    sum      one sum over the ranks, in parts, each rank weighed by its share of the counts

Replicas begin the sums before they meet, with overlap in the last backward. The meeting tells
whether they are good.

A rank whose call ends by an error meets, too, and says so. Then all ranks end that call by an
error, and can go on with the next one. Source: docs/distributed.md.
"""

"""`torchrun -m gpipe_lab.train --config FILE`: the lab's engine on as many machines as there are."""

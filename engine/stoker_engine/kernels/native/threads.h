// How many threads an operation may use. OpenMP's own setting belongs to the thread that made it, and the engine's
// thread is another one than that which loads it.
#pragma once

extern int threads;

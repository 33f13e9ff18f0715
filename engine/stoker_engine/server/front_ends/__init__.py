"""Several front ends of one server: processes that accept connections of the same socket, and their supervisor.

control        messages between the supervisor and its front ends
supervisor     starts, restarts and stops the front ends; owns the engines, their records and the stored responses
engine_links   links every front end to every engine
supervised     a front end's view of its supervisor: `Peers`, and where its links to engines come from
main           a front end's program
"""

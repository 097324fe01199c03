"""Communication between ranks: control plane, collectives, rendezvous and failure reports."""

"""How much each key may use, and how much it has used: alone, or together with other replicas of the gateway."""

"""From a walk to a written program: planning, policy, emission, effective sizes."""

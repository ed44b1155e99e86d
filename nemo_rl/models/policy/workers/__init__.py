"""Worker processes of the policy: `dtensor_policy_worker_v2.DTensorPolicyWorkerV2`, one per training device."""

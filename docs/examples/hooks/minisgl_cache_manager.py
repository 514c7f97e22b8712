"""Print which part of its pages each admitted request reads from the prefix cache."""

from minisgl import hookimpl


@hookimpl
def minisgl_cache_manager():
    from minisgl.plugins.cache.prefix import PrefixCacheManager

    class Reporting(PrefixCacheManager):
        def admit(self, reqs, step):
            super().admit(reqs, step)
            for req in reqs:
                pages = int(self.request_table.num_pages[req.req_pool_idx])
                print(f"step {step}: {req.num_cached_pages} of {pages} pages are the cache's", flush=True)

    return Reporting

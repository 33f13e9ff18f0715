# The images that a cluster starts from, one target each.
ARG DEBIAN_IMAGE
FROM $DEBIAN_IMAGE AS collect
RUN mkdir -p /out/usr/local/bin /out/usr/sbin /out/tmp /out/run /out/etc \
 # kube-proxy and kindnet run iptables: its programs, its extensions, and every library they load.
 && cp --parents -t /out /usr/sbin/xtables-nft-multi /usr/sbin/nft /usr/lib/*/xtables/*.so \
 && ldd /usr/sbin/xtables-nft-multi /usr/sbin/nft /usr/lib/*/xtables/*.so \
    | grep -oE '/[^ :]+\.so[^ :]*' | sort -u | xargs cp --parents --update -L -t /out \
 && for name in iptables ip6tables; do for suffix in "" -save -restore; do \
      ln -s xtables-nft-multi /out/usr/sbin/$name$suffix; done; done \
 && for name in kube-apiserver kube-controller-manager kube-scheduler kube-proxy etcd kubectl kindnet; do \
      ln -s kube /out/usr/local/bin/$name; done

FROM scratch AS kube
COPY --from=collect /out /
COPY kube /usr/local/bin/kube
ENV PATH=/usr/local/bin:/usr/sbin

FROM scratch AS coredns
COPY coredns /coredns
ENTRYPOINT ["/coredns"]

FROM scratch AS pause
COPY pause /pause
ENTRYPOINT ["/pause"]

FROM scratch AS local-path-provisioner
COPY local-path-provisioner /bin/
ENV PATH=/bin

FROM scratch AS busybox
COPY --from=collect /bin/busybox /bin/busybox
RUN ["/bin/busybox", "--install", "-s", "/bin"]
ENV PATH=/bin
